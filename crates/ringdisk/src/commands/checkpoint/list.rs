//! What checkpoints a disk has, and what bitmaps its image.
//!
//! Promises: text of a server has no control character that a terminal would obey.

use std::path::Path;
use std::time::Duration;

use ringdisk_daemon::control::checkpoint::words::Listed;
use ringdisk_daemon::control::client::{Client, Timeout};
use ringdisk_daemon::control::protocol::Command;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::size::human_size;
use ringdisk_daemon::terminal::{self, visible};
use ringdisk_disk::Progress;
use serde::Deserialize;
use serde_json::Value;

use crate::commands::output::json_text;

/// The image on top of a disk, as its server knows it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Image {
    /// Whether it can have bitmaps.
    pub(crate) has_bitmaps: bool,
    pub(crate) bitmaps: Vec<Bitmap>,
}

/// A bitmap of an image.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Bitmap {
    pub(crate) name: String,
    pub(crate) records: bool,
    pub(crate) inconsistent: bool,
}

impl Image {
    /// Whether a backup can hold what this bitmap has recorded.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.bitmaps.iter().any(|bitmap| bitmap.name == name && !bitmap.inconsistent)
    }
}

/// Asks a server.
fn ask(client: &mut Client, limit: Duration) -> Result<Value, Failure> {
    client.call(&Command::CheckpointList, &Progress::new(), Timeout::Answer(limit))
}

/// The checkpoints of a disk, and its image.
///
/// Errors: those of the server.
pub(crate) fn listed(
    client: &mut Client,
    limit: Duration,
) -> Result<(Vec<Listed>, Image), Failure> {
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
pub(crate) fn look(client: &mut Client, limit: Duration) -> Result<Image, Failure> {
    listed(client, limit).map(|(_, image)| image)
}

/// `ringdisk ctl TARGET checkpoint --list`.
pub(super) fn run(path: &Path, limit: Duration, json: bool) -> Result<(), Failure> {
    let mut client = Client::connect(path, limit)?;
    if json {
        terminal::say(json_text(&ask(&mut client, limit)?));
        return Ok(());
    }
    let (all, image) = listed(&mut client, limit)?;
    if all.is_empty() {
        terminal::say("No checkpoint.");
    }
    for checkpoint in all {
        let (used, max) = (human_size(checkpoint.fleeced), human_size(checkpoint.fleece_max));
        let state = match &checkpoint.failed {
            Some(why) => format!("failed: {}", visible(why)),
            None => format!("{used} of old data, at most {max}"),
        };
        let (name, uri) = (visible(&checkpoint.name), visible(&checkpoint.uri));
        terminal::say(format_args!("{name}: {uri}\n  {state}"));
        for (what, bitmap) in [("since", &checkpoint.since), ("started", &checkpoint.bitmap)] {
            if let Some(bitmap) = bitmap {
                terminal::say(format_args!("  {what}: bitmap {}", visible(bitmap)));
            }
        }
    }
    for bitmap in &image.bitmaps {
        let state = match (bitmap.inconsistent, bitmap.records) {
            (true, _) => "inconsistent: what it says cannot be trusted",
            (false, true) => "records",
            (false, false) => "stands still",
        };
        terminal::say(format_args!("bitmap {}: {state}", visible(&bitmap.name)));
    }
    Ok(())
}
