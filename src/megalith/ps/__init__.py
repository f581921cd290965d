"""Parameter servers on Ray: `ServerShards`. Needs the extra `servers`; Ray is imported at first use.

side    file                 content
worker  shards.py            `ServerShards`: the process that trains; resize
        lookup.py            a batch: `ServerLookup`, and the writes of its update
        link.py              connections to servers: retries, reconnects, membership
both    messages.py          what both sides send: `ServerWrite`, arrays
        channel_messages.py  handshake, frames and messages of the sockets
        channel_client.py    the end of a worker
        channel_listener.py  the end of a server
        shared_memory.py     memory that both sides share on one host
server  table_space.py       order of calls, workers, synchronous steps; begin here
        table_server.py      `TableServer`: the process that has the rows
        writes.py            what each kind of write does; touched ids of consumers
log     recovery.py          how a server gets its rows back: the replay of its log, folders of logs
        update_log.py        the log of a server: segments, records, points
launch  launch.py            `Servers`: starts, places and connects the processes
others  reader.py            reads rows without joining the workers
        status.py            numbers for the command line, Prometheus and Ray
"""

from megalith.ps.launch import Servers
from megalith.ps.lookup import ServerLookup
from megalith.ps.shards import ServerShards

__all__ = ["ServerLookup", "ServerShards", "Servers"]
