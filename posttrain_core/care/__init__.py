"""Care of a store: fsck looks whether it is whole, gc removes what nothing needs, fork and export make new from it."""
