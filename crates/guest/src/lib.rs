//! Memory of a guest, and the virtqueues in it.

#![deny(unsafe_code)]
