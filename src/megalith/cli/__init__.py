"""The command line: one file per command. `main.app` holds all commands.

A command file declares the arguments, calls the library and prints the result. It computes nothing itself.
"""
