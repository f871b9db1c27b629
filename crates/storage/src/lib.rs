//! ringdisk storage.
