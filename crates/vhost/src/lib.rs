//! A disk for virtual machines: vhost-user-blk.

#![forbid(unsafe_code)]
