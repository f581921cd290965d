"""Messages of TF Serving, the Open Inference Protocol v2 and Monolith's parameter sync, and their tensors.

The `.proto` files in this folder have the public names, packages and field numbers. Needs protobuf,
the extra `serve`.
"""
