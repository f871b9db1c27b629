//! ringdisk.
fn main() {}
