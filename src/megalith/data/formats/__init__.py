"""Wire formats under the readers: record files and compression."""
