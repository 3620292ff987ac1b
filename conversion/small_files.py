"""What lies beside the weights of a checkpoint and goes along: config, tokenizer and the like."""

import re
from pathlib import Path

from ..errors import CheckpointError
from ..files.paths import inside
from .formats import FORMATS
from .output import Output

# Tokenizers have tens of megabytes.
LARGEST_SMALL_FILE = 256 << 20
# Of training runs, of formats that are not read, what is written anew, and what is hidden.
_OTHERS = (
    r"\..*|conversion\.json|trainer_state\..*|training_args\..*|README\.md|loss\.png|optimizer.*|scheduler.*|scaler.*"
    r"|rng_state.*|.*\.(pt|pth|pkl|ckpt|h5|msgpack|gguf|onnx|tmp)"
)


def copy_small_files(source: Path, output: Output) -> list[str]:
    """Copies every plain file that holds no weights of any format and belongs to no training run.

    Raises:
        CheckpointError: a link leads out of the folder, or a file is large.
    """
    others = re.compile("|".join((_OTHERS, *(format.files for format in FORMATS.values()))))
    copied = []
    for path in sorted(source.iterdir()):
        if path.is_file() and not others.fullmatch(path.name):
            if inside(source, path.name).stat().st_size > LARGEST_SMALL_FILE:
                raise CheckpointError(f"{path} is neither weights nor a small file: move it out of the folder.")
            output.add(path.name, path.read_bytes())
            copied.append(path.name)
    return copied
