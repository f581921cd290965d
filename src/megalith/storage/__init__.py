"""Files in local directories and object stores behind one interface."""
