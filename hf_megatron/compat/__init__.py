"""Private and version-dependent upstream symbols, one file per library, and the patch registry."""
