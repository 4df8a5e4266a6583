"""Object stores: a local folder, S3 and memory behind one protocol."""

from posttrain_core.store.factory import open_store
from posttrain_core.store.protocol import ObjectInfo, ObjectStore

__all__ = ["ObjectInfo", "ObjectStore", "open_store"]
