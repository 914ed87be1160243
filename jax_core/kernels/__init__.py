"""Attention of one shard of queries over one shard of keys: each folder is a kernel that follows ``contract``.

Called by strategies; a kernel calls the masks and the files in this folder, never another kernel.
"""
