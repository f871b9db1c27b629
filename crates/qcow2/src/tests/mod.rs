//! Tests of the pure parts: bytes in, values out.

mod decode;
mod entry;
mod extensions;
mod flight;
mod run;
mod slices;
