"""Custom parallel axis outside of the library: this folder, and one line that registers it."""
