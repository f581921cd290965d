"""The sockets over which lookups and pushes travel, and the memory that both sides share on one host."""
