"""`python -m hf_megatron.cli`."""

from . import main

main()
