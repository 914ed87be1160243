"""What users call: attention on one device, inside ``shard_map`` or on a mesh, and the forward/backward pair that torch calls.

Any package may call it; it may call every package below.
"""
