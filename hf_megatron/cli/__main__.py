"""Runs the command line as a module."""

from . import main

main()
