//! ringdisk fuse.
