"""Tests of the pickle reader that runs no code: supported values and rejection of hostile pickles."""

import argparse
import collections
import os
import pickle
import random
import signal
import struct
import subprocess

import pytest

from hf_megatron import CheckpointError
from hf_megatron.conversion.torch_files import pickle_machine
from hf_megatron.conversion.torch_files.safe_pickle import Named, Record, enumeration_names, record_names, unpickle
from hf_megatron.conversion.torch_files.torch_save import OBJECTS

VALUES = [
    None,
    True,
    [1, -1, 255, 256, 70000, 2**31, -(2**40), 2**80, 1.5, float("inf")],
    {"a": (1,), "b": (1, 2), "c": (1, 2, 3), "d": (1, 2, 3, 4), "e": ()},
    {1: [[], [[]]], None: {"nested": {"x" * 300: "Ω" * 300}}},
    {"set": {1, 2, 3}, "bytes": b"ab" * 300, "frozen": frozenset([1])},
    collections.OrderedDict([("first", 1), ("second", 2)]),
    {("a", 1): 2},
]


def system(command: str) -> object:
    """Returns an object whose pickle runs a command."""

    class Bomb:
        def __reduce__(self):
            return os.system, (command,)

    return Bomb()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_plain_values_match_pickle(value, protocol):
    names = {"builtins.frozenset": Named("builtins.frozenset", lambda arguments: frozenset(arguments[0]))}
    names["__builtin__.frozenset"] = names["builtins.frozenset"]
    assert unpickle(pickle.dumps(value, protocol), "here", names) == value


def test_objects_become_records():
    shared = [1]
    value = argparse.Namespace(a=shared, b=shared)
    record = unpickle(pickle.dumps(value), "here", record_names("argparse.Namespace"))
    assert type(record) is Record
    assert (record.kind, record["a"], record.get("c")) == ("argparse.Namespace", [1], None)
    assert record["a"] is record["b"]
    with pytest.raises(KeyError):
        record["c"]


def check_rejected(data: bytes, *needles: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        unpickle(data, "folder/.metadata", record_names("argparse.Namespace"), prefixes=("megatron.",))
    assert "folder/.metadata" in str(caught.value)
    for needle in needles:
        assert needle in str(caught.value)


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        ("os\nsystem", "touch {canary}", "os.system"),
        ("posix\nsystem", "touch {canary}", "posix.system"),
        ("builtins\neval", "open({canary!r}, 'w')", "builtins.eval"),
        ("builtins\nexec", "open({canary!r}, 'w')", "builtins.exec"),
        ("__builtin__\neval", "open({canary!r}, 'w')", "__builtin__.eval"),
        ("builtins\ngetattr", "x", "builtins.getattr"),
        ("builtins\nopen", "{canary}", "builtins.open"),
        ("torch\nload", "{canary}", "torch.load"),
        ("torch.serialization\nload", "{canary}", "torch.serialization.load"),
        ("torch\nimport_ir_module", "{canary}", "torch.import_ir_module"),
        ("subprocess\nPopen", "touch {canary}", "subprocess.Popen"),
        ("importlib\nimport_module", "antigravity", "importlib.import_module"),
        ("argparse\nNamespace.__init__.__globals__", "x", "argparse.Namespace.__init__.__globals__"),
        ("argparse\nArgumentParser", "x", "argparse.ArgumentParser"),
    ],
)
def test_no_function_is_called(tmp_path, function, arguments, name):
    canary = tmp_path / "canary"
    argument = arguments.format(canary=str(canary)).encode()
    argument_bytes = b"X" + struct.pack("<I", len(argument)) + argument
    check_rejected(b"\x80\x02c" + function.encode() + b"\n(" + argument_bytes + b"tR.", name)
    module, _, attribute = function.encode().partition(b"\n")
    encoded_names = b"".join(b"\x8c" + bytes([len(component)]) + component for component in (module, attribute))
    check_rejected(b"\x80\x04" + encoded_names + b"\x93(" + argument_bytes + b"tR.", name)
    check_rejected(b"\x80\x04" + encoded_names + b"\x93(" + argument_bytes + b"t\x81.", name)
    check_rejected(pickle.dumps({"state": [system(f"touch {canary}")]}), "system")
    assert not canary.exists()


def test_records_are_not_called_and_prefixes_are_literal(tmp_path):
    record = unpickle(b"\x80\x02cmegatron.evil\nrun\n(X\x01\x00\x00\x00atR.", "here", {}, prefixes=("megatron.",))
    assert (record.kind, record.arguments) == ("megatron.evil.run", ("a",))
    check_rejected(b"\x80\x02cmegatron\nx\n)R)R.")
    check_rejected(b"\x80\x02cmegatronx.y\nz\n)R.", "megatronx.y.z")
    check_rejected(b"\x80\x02)\x81.")
    # Attributes may only be set on records.
    check_rejected(b"\x80\x02]}b.")
    check_rejected(b"\x80\x02cargparse\nNamespace\n}b.")


def pickle_text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


GETATTR = b"cbuiltins\ngetattr\n"
SHAPE = b"cenums\nShape\n"
ROUND = pickle_text("ROUND")
# Calls of getattr other than reading a public enum member by name.
INVALID_GETATTRS = {
    "of_a_class_that_is_no_enumeration": GETATTR + b"cargparse\nNamespace\n" + ROUND + b"\x86R.",
    "of_a_container": GETATTR + b"ccollections\nOrderedDict\n" + ROUND + b"\x86R.",
    "of_a_member": GETATTR + GETATTR + SHAPE + ROUND + b"\x86R" + pickle_text("value") + b"\x86R.",
    "of_an_object": GETATTR + b"cargparse\nNamespace\n)R" + pickle_text("kind") + b"\x86R.",
    "of_getattr": GETATTR + GETATTR + ROUND + b"\x86R.",
    "of_text": GETATTR + pickle_text("enums.Shape") + ROUND + b"\x86R.",
    "of_a_module": GETATTR + b"cenums\n__dict__\n" + ROUND + b"\x86R.",
    "of_what_is_not_read": GETATTR + b"cos\nsystem\n" + ROUND + b"\x86R.",
    "a_private_name": GETATTR + SHAPE + pickle_text("_member_map_") + b"\x86R.",
    "a_special_name": GETATTR + SHAPE + pickle_text("__class__") + b"\x86R.",
    "a_path": GETATTR + SHAPE + pickle_text("ROUND.value") + b"\x86R.",
    "no_name": GETATTR + SHAPE + pickle_text("") + b"\x86R.",
    "bytes": GETATTR + SHAPE + b"C\x05ROUND\x86R.",
    "a_class_as_the_name": GETATTR + SHAPE + SHAPE + b"\x86R.",
    "alone": GETATTR + SHAPE + b"\x85R.",
    "with_a_default": GETATTR + SHAPE + ROUND + b"N\x87R.",
    "of_a_list": GETATTR + b"](" + SHAPE + ROUND + b"eR.",
    "as_an_object_is_made": GETATTR + SHAPE + ROUND + b"\x86\x81.",
    "as_an_object_is_made_with_keywords": GETATTR + SHAPE + ROUND + b"\x86}\x92.",
    "and_the_member_is_called": GETATTR + SHAPE + ROUND + b"\x86R(tR.",
    "and_getattr_has_attributes": GETATTR + b"}b.",
    "and_getattr_is_a_key": b"}" + GETATTR + b"Ns.",
    "under_another_name": b"coperator\nattrgetter\n" + ROUND + b"\x85R.",
}


def test_enum_members_from_all_pickle_forms():
    names = enumeration_names("enums.Shape")
    by_value = b"\x80\x02" + SHAPE + b"K\x01\x85R."
    by_name = b"\x80\x02" + GETATTR.replace(b"builtins", b"__builtin__") + SHAPE + ROUND + b"\x86R."
    short = [b"\x8c" + bytes([len(word)]) + word for word in (b"builtins", b"getattr", b"enums", b"Shape", b"ROUND")]
    stacked = b"\x80\x04" + b"".join((*short[:2], b"\x93", *short[2:4], b"\x93", short[4], b"\x86R."))
    for data, argument in ((by_value, 1), (by_name, "ROUND"), (stacked, "ROUND")):
        record = unpickle(data, "here", names)
        assert (type(record), record.kind, record.arguments) == (Record, "enums.Shape", (argument,))
    # Names accepted by prefix may be enums.
    record = unpickle(by_name, "here", {}, prefixes=("enums.",))
    assert (record.kind, record.arguments) == ("enums.Shape", ("ROUND",))


@pytest.mark.parametrize("data", INVALID_GETATTRS.values(), ids=INVALID_GETATTRS)
def test_getattr_is_rejected_except_on_enums(data):
    names = {**record_names("argparse.Namespace"), **enumeration_names("enums.Shape")}
    with pytest.raises(CheckpointError, match="here is (rejected|damaged)"):
        unpickle(b"\x80\x04" + data, "here", names)


def test_uncalled_getattr_is_inert():
    values = unpickle(b"\x80\x02" + GETATTR + SHAPE + b"\x86.", "here", enumeration_names("enums.Shape"))
    assert getattr not in values


def test_signals_from_all_pickle_forms():
    assert unpickle(b"\x80\x02csignal\nSignals\nK\x0f\x85R.", "here", OBJECTS).arguments == (15,)
    assert unpickle(b"\x80\x02csignal\nSIGTERM\n.", "here", OBJECTS).name == "signal.SIGTERM"
    assert unpickle(pickle.dumps(signal.SIGTERM), "here", OBJECTS) is not signal.SIGTERM
    with pytest.raises(CheckpointError, match="signal.signal"):
        unpickle(b"\x80\x02csignal\nsignal\n.", "here", OBJECTS)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "damaged"),
        (b"\x80\x02", "damaged"),
        (b"\x80\x01N.", "protocol 1"),
        (b"\x80\x07N.", "protocol 7"),
        (b"(S'text'\ni.", "operation"),
        (b"\x80\x04\x95" + b"\xff" * 8 + b"N.", "truncated"),
        # Lengths beyond the end of the data.
        (b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.", "truncated"),
        (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.", "truncated"),
        (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x.", "truncated"),
        (b"\x80\x02\x8b" + struct.pack("<I", 1 << 31) + b"x.", "truncated"),
        # Missing entries of the memo and the stack.
        (b"\x80\x02h\x05.", "damaged"),
        (b"\x80\x04\x94.", "damaged"),
        (b"\x80\x02a.", "damaged"),
        (b"\x80\x02(.", "damaged"),
        (b"\x80\x02NN.", "damaged"),
        (b"\x80\x02(\x85.", "damaged"),
        (b"\x80\x02}(Ku.", "damaged"),
        (b"\x80\x02}](NNeNs.", "key"),
        (b"\x80\x02NQ.", "persistent"),
        (b"\x80\x02P1\n.", "operation"),
        # Extension codes and out-of-band buffers.
        (b"\x80\x02\x82\x01.", "operation"),
        (b"\x80\x05\x97.", "operation"),
    ],
)
def test_damaged_pickles_are_rejected(data, reason):
    check_rejected(data, reason)


def test_large_memo_index_takes_no_memory():
    assert unpickle(b"\x80\x02Nr\xff\xff\xff\xff0j\xff\xff\xff\xff.", "here", {}) is None


def test_exponential_hash_keys_are_rejected():
    # Repeated pairs of the previous tuple, as a dict key and in sets.
    doubled = b")q\x00" + b"0h\x00h\x00\x86q\x00" * 200
    check_rejected(b"\x80\x02}" + doubled + b"Ns.", "key")
    check_rejected(b"\x80\x04\x8f(" + doubled + b"\x90.", "key")
    check_rejected(b"\x80\x04(" + doubled + b"\x91.", "key")


def test_exponentially_shared_objects_are_rejected():
    message = "repeats shared objects"
    doubled = b"]q\x00" + b"0]q\x010h\x01h\x00ah\x00aq\x00" * 60
    check_rejected(b"\x80\x02" + doubled + b".", message)
    # Records whose states are set after all of them are in the memo.
    records = b"".join(b"cargparse\nNamespace\n)\x81q%c0" % index for index in range(60))
    states = b"".join(b"h%ch%ch%c\x86b0" % (index, index - 1, index - 1) for index in range(1, 60))
    check_rejected(b"\x80\x02" + records + b"h\x3b" + states + b".", message)
    # A long string, repeated by reference.
    check_rejected(
        b"\x80\x02]X" + struct.pack("<I", 1 << 20) + b"x" * (1 << 20) + b"q\x00a(" + b"h\x00" * 100 + b"e.", "larger"
    )


@pytest.mark.parametrize(
    "made", [b"h\x00)R", b"h\x00)\x81", b"h\x00)}\x92", b"]", b"}", b"\x8f", b"N\x85", b"(t", b"(\x91"]
)
def test_all_object_opcodes_count_against_the_budget(monkeypatch, made):
    monkeypatch.setattr(pickle_machine, "_PARTS", 1000)
    start = b"\x80\x04cargparse\nNamespace\nq\x000("
    unpickle(start + made * 400 + b"t.", "here", record_names("argparse.Namespace"))
    check_rejected(start + made * 1200 + b"t.", "far larger")


def test_small_shared_objects_are_read():
    names = record_names("argparse.Namespace")
    small, table = (1, "x"), {"a": 1}
    value = [small, small, [table, table], argparse.Namespace(), None] * 100
    values = unpickle(pickle.dumps(value), "here", names)
    assert len(values) == 500 and values[2] == [table, table] and values[0] is values[1] == small


def test_deep_nesting_needs_no_recursion():
    depth = 200_000
    value = unpickle(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".", "here", {})
    for _ in range(depth - 1):
        (value,) = value
    assert value == []


def test_corrupted_pickles_load_or_raise_checkpoint_error(tmp_path):
    value = {"items": [argparse.Namespace(shape=(1, 2), name="x" * 40, big=2**70)] * 3, "rest": {1, 2}}
    names = record_names("argparse.Namespace")
    for protocol in (2, 4):
        data = pickle.dumps(value, protocol)
        for end in range(len(data)):
            check_rejected(data[:end])
        generator = random.Random(0)
        for _ in range(3000):
            changed = bytearray(data)
            for _ in range(generator.choice((1, 2, 4))):
                changed[generator.randrange(len(data))] = generator.randrange(256)
            try:
                unpickle(bytes(changed), "here", names)
            except CheckpointError as error:
                assert str(error).startswith("here ")


def test_bombs_run_under_plain_pickle(tmp_path):
    """Confirms that the bombs of these tests run code."""
    canary = tmp_path / "canary"
    bomb = tmp_path / "bomb"
    bomb.write_bytes(pickle.dumps(system(f"touch {canary}")))
    subprocess.run(["python3", "-c", f"import pickle; pickle.load(open({str(bomb)!r}, 'rb'))"], check=True)
    assert canary.exists()
