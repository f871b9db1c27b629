//! Changes of persistent bitmaps of an image.
//!
//! Promises: each change is there as a whole or not at all after a crash ([`update`]), and nothing
//! that another program may read is overwritten.
//!
//! - [`change`]: add, remove, clear, enable, disable, merge;
//! - [`add_in_use`]: add, while requests run;
//! - [`instant`]: copying and clearing what is recorded, between two requests;
//! - [`save`]: what was recorded, at the close;
//! - [`resize`]: when the size of the disk changes, and when metadata moves;
//! - [`store`]: contents to new clusters.

mod add_in_use;
mod change;
mod instant;
mod resize;
mod save;
mod store;
mod update;

pub use change::BitmapContents;
pub(super) use resize::{move_behind, resize, walk};
pub(super) use save::{Unsaved, save};
