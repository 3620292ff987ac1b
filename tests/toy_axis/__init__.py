"""A parallel axis that the library does not know: this folder, and one line that lists it."""
