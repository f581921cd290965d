"""Valid calls of the public API, from which `tests/test_wrong_input.py` makes wrong ones.

One file per part of the API; `sweep.py` finds what is public and completes arguments. A public method of an
object that is listed here needs no entry if `sweep.VALUES` has a value for each of its required arguments.
"""
