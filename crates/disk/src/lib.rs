//! ringdisk disk.
