"""Serving: trained models answer requests, and rows trained a moment ago reach them.

`proto` holds the messages on the wire, `discovery` says who serves what, `sync_config` tells a trainer where
to push. They need the extras `serve` and `discovery`; `import megalith` imports none of it.
"""
