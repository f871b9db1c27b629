//! ringdisk testkit.
