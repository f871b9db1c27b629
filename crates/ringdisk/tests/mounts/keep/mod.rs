//! `--keep-mount`: the serving process is killed again and again, and its clients notice nothing.

pub(crate) mod client;
mod device;
mod ends;
mod jobs;
pub(crate) mod kept;
mod kill;
mod manager;
mod overlays;
mod starts;
mod state;
