//! ringdisk qcow2.
