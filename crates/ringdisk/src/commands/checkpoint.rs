//! `ringdisk ctl TARGET checkpoint …`: checkpoints of disks that other processes serve.
//!
//! Promises: text of a server has no control character that a terminal would obey.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use ringdisk_backup::checkpoint::{self, Target, Wanted};
use ringdisk_console::output::json_text;
use ringdisk_daemon::control::client::Client;
use ringdisk_daemon::control::protocol::checkpoint::Bitmaps;
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::size::human_size;
use ringdisk_daemon::terminal::{self, shell_word, visible};
use ringdisk_disk::Progress;
use ringdisk_server::nbd::addresses::listen_on;
use serde_json::{Value, json};

use crate::cli::{Address, CheckpointArgs};

/// `ringdisk ctl TARGET checkpoint …`.
///
/// Errors: those of the servers; what cannot be made.
pub(crate) fn run(path: &Path, limit: Duration, args: &CheckpointArgs) -> Result<(), Failure> {
    if args.list {
        return list(path, limit, args.json);
    }
    let name = args.name.as_deref().unwrap_or_default();
    if args.end {
        let bitmaps = match (args.keep_bitmap, args.merge) {
            (true, _) => Bitmaps::Keep,
            (_, true) => Bitmaps::Merge,
            _ => Bitmaps::Drop,
        };
        return checkpoint::end(path, limit, name, bitmaps);
    }
    let paths = std::iter::once(path).chain(args.with.iter().map(PathBuf::as_path));
    let targets = paths.map(|path| {
        let client = Client::connect(path, limit)?;
        let (bitmap, since) = (args.bitmap.clone(), args.since.clone());
        Ok(Target { client, path: path.to_owned(), bitmap, since })
    });
    let targets = targets.collect::<Result<Vec<Target>, Failure>>()?;
    let wanted = Wanted {
        name,
        address: args.nbd.as_ref(),
        listen,
        fleece: &(&args.fleece).into(),
        is_leased: false,
    };
    let checkpoint = checkpoint::begin(targets, &wanted, &Progress::new())?;
    if args.json {
        let disks = checkpoint.disks.iter().map(|disk| {
            json!({
                "target": disk.client.target_name(),
                "export": disk.begin.export,
                "uri": disk.begin.uri,
                "size": disk.size,
                "paused-us": disk.paused.as_micros(),
                "bitmap": disk.begin.bitmap,
                "since": disk.begin.since,
            })
        });
        let disks: Vec<Value> = disks.collect();
        terminal::say(json_text(&json!({ "name": name, "disks": disks })));
    } else {
        for disk in &checkpoint.disks {
            terminal::say(format_args!("{}: {}", disk.client.target_name(), disk.begin.uri));
        }
        if terminal::is_interactive() {
            let shown = shell_word(&path.display().to_string());
            terminal::say(format_args!("  end: `ringdisk ctl {shown} checkpoint --end {name}`"));
        }
    }
    checkpoint.leave();
    Ok(())
}

/// Listens on all addresses of a host that there are here.
fn listen(address: &Address) -> Result<Vec<OwnedFd>, Failure> {
    let way_out = "a Unix socket (--nbd unix:PATH), which `ssh -L` can forward, changes that";
    listen_on(address, Some(way_out))
}

/// `ringdisk ctl TARGET checkpoint --list`.
fn list(path: &Path, limit: Duration, json: bool) -> Result<(), Failure> {
    let mut client = Client::connect(path, limit)?;
    if json {
        terminal::say(json_text(&checkpoint::ask(&mut client, limit)?));
        return Ok(());
    }
    let (all, image) = checkpoint::listed(&mut client, limit)?;
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
