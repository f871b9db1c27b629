//! What checkpoints a disk has, and what bitmaps its image, as its server says.
//!
//! Promises: changes nothing. What a server says may hold anything: who shows it makes it visible.

use std::time::Duration;

use ringdisk_daemon::control::client::{Client, Timeout};
use ringdisk_daemon::control::protocol::Command;
use ringdisk_daemon::control::protocol::checkpoint::Listed;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_disk::Progress;
use serde::Deserialize;
use serde_json::Value;

/// The image on top of a disk, as its server knows it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Image {
    /// Whether it can have bitmaps.
    pub has_bitmaps: bool,
    /// Those that it has.
    pub bitmaps: Vec<Bitmap>,
}

/// A bitmap of an image.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Bitmap {
    /// Its name.
    pub name: String,
    /// It records what is written.
    pub records: bool,
    /// What it says cannot be trusted.
    pub inconsistent: bool,
}

impl Image {
    /// Whether a backup can hold what this bitmap has recorded.
    pub fn has(&self, name: &str) -> bool {
        self.bitmaps.iter().any(|bitmap| bitmap.name == name && !bitmap.inconsistent)
    }
}

/// Asks a server: all that it says, as JSON.
///
/// Errors: those of the server.
pub fn ask(client: &mut Client, limit: Duration) -> Result<Value, Failure> {
    client.call(&Command::CheckpointList, &Progress::new(), Timeout::Answer(limit))
}

/// The checkpoints of a disk, and its image.
///
/// Errors: those of the server.
pub fn listed(client: &mut Client, limit: Duration) -> Result<(Vec<Listed>, Image), Failure> {
    let value = ask(client, limit)?;
    let read = |key: &str| value.get(key).cloned().unwrap_or_default();
    let rubbish = |error: serde_json::Error| {
        Failure::new(Exit::General, format!("what the server said makes no sense: {error}"))
    };
    let all: Vec<Listed> = serde_json::from_value(read("checkpoints")).map_err(rubbish)?;
    let image = serde_json::from_value(read("image")).map_err(rubbish)?;
    Ok((all, image))
}

/// The image of a disk.
///
/// Errors: those of the server.
pub fn look(client: &mut Client, limit: Duration) -> Result<Image, Failure> {
    listed(client, limit).map(|(_, image)| image)
}
