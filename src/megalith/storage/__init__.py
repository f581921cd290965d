"""Storage: files in local directories and object stores behind one interface.

Also the safetensors format, checksums, atomic writes and the strict JSON reader. What files mean is up to the
packages that write them (checkpoint, serving, gather); they also choose the error type.
"""
