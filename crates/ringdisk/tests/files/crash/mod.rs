//! The real program, killed and watched: what a crash leaves under real clients.
//!
//! To see every write and flush below the storage layer, the image lies on a storage of the test
//! itself: the test serves it, recorded, as a file, and the program under test serves the disk
//! inside that file. Afterwards every moment of the run is lived through again.

mod client;
mod kill;
mod recorder;
