"""What users call: attention on one device, inside ``shard_map``, on a mesh; and the pair that torch calls.

May be called by anyone; calls everything below.
"""
