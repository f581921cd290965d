"""Parameter servers on Ray: `ServerShards`. Needs the extra `servers`; Ray is imported at first use.

    folder     content                                            begin with
    worker/    the process that trains: `ServerShards`            server_shards.py
    channel/   lookups and pushes between the two, over sockets   channel_messages.py
    server/    the process that has the rows                      table_space.py
    log/       what a server needs to start again                 recovery.py, update_log.py
    ray/       starts, places and connects the processes          ray_servers.py

Both sides use `server_messages.py`. `server_reader.py` and `server_status.py` are for other processes, which
do not join the workers.
"""
