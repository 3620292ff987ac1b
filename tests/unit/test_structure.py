"""The layering of the library: imports point downwards, and no files import each other."""

from tests.structure import ORDER, circles, files, room, upward_arrows


def test_every_room_has_its_floor():
    rooms = [name for names in ORDER for name in names]
    assert len(rooms) == len(set(rooms))
    assert {room(module) for module in files()} == set(rooms)


def test_imports_point_downwards():
    assert upward_arrows() == []


def test_no_files_import_each_other():
    assert circles() == []
