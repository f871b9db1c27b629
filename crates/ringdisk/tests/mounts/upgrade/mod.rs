//! `mount --upgrade`: a mount goes from process to process while it is in use.

mod jobs;
mod kept;
mod killed;
mod load;
mod refused;
mod upgraded_mount;
mod users;
