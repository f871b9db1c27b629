//! ringdisk ring.
