//! Jobs of a server that copy its disk, begun from outside: mirrors and backups.
//!
//! Promises: the server, which may be in a sandbox, makes no file: the target and the file for old
//! data are made and opened here, as those of the user who asks. The caller removes a target that
//! was made where the job does not begin.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use ringdisk_daemon::control::checkpoint::round::fleecing_file;
use ringdisk_daemon::control::client::{ANSWER, Client, Timeout};
use ringdisk_daemon::control::protocol::jobs::Terms;
use ringdisk_daemon::control::protocol::{Backup, Command, Mirror};
use ringdisk_daemon::failure::Failure;
use ringdisk_daemon::new_file::NewFiles;
use ringdisk_disk::{Format, Progress};
use serde_json::Value;

use crate::checkpoint::Fleece;
use crate::target::{self, Named, Rest};

/// Why the target of a copy of what a bitmap has marked is there.
const MARKED: &str = "with --bitmap the target has the rest of the disk already";

/// Where a job copies to.
#[derive(Clone, Debug)]
pub struct CopyTo {
    /// A file, a device, or the address of an export.
    pub to: PathBuf,
    /// Format of the target; `None`: it is looked at.
    pub format: Option<Format>,
    /// A target that is there is overwritten.
    pub existing: bool,
    /// How the job is run; `None`: nothing is said, as older servers understand.
    pub terms: Option<Terms>,
}

/// A mirror that is asked for.
#[derive(Clone, Debug)]
pub struct MirrorRequest {
    /// Where to.
    pub to: CopyTo,
    /// What is copied at the beginning: full, top or none; `None`: full, or what the bitmap says.
    pub sync: Option<String>,
    /// A bitmap of the image on top: what it has marked is copied at the beginning.
    pub bitmap: Option<String>,
    /// Writes of clients go to the target before they are answered.
    pub write_blocking: bool,
    /// The disk switches over to the target, and the answer comes then.
    pub complete: bool,
}

/// A backup that is asked for.
#[derive(Clone, Debug)]
pub struct BackupRequest {
    /// Where to.
    pub to: CopyTo,
    /// What is copied: full or top; `None`: full, or what the bitmap says.
    pub sync: Option<String>,
    /// A bitmap of the image on top: what it has marked is copied.
    pub bitmap: Option<String>,
    /// Where old data goes that clients overwrite meanwhile.
    pub fleece: Fleece,
}

/// Has the server begin a mirror. Gives the name of the job; or, where the disk switches over, what
/// was done.
///
/// * `limit`: how long an answer may take.
/// * `fresh`: gets a target that was made.
///
/// Errors: the target is none for this disk; the server's reason.
pub fn mirror(
    client: &mut Client,
    limit: Duration,
    wanted: &MirrorRequest,
    fresh: &NewFiles,
    progress: &Progress,
) -> Result<Value, Failure> {
    let rest = match (wanted.sync.as_deref(), &wanted.bitmap) {
        (_, Some(_)) => Rest::There(MARKED),
        (Some("none"), None) => {
            Rest::There("with --sync none the target has what the disk holds already")
        }
        (Some("top"), None) => Rest::Below,
        _ => Rest::Nothing,
    };
    let target = prepare(client, limit, (&wanted.to, rest), fresh, progress)?;
    let mut terms = wanted.to.terms.clone().unwrap_or_default();
    terms.background |= !wanted.complete;
    let command = Command::Mirror(Mirror {
        target: target.name,
        format: target.format.map(|format| format.name().to_owned()),
        protect_raw: target.protect_raw,
        sync: wanted.sync.clone(),
        bitmap: wanted.bitmap.clone(),
        write_blocking: wanted.write_blocking,
        complete: wanted.complete,
        job: Some(terms),
    });
    client.call(&command, progress, Timeout::Work(limit.max(ANSWER)))
}

/// Has the server make a backup. Gives the name of a job in the background, or what was done.
///
/// * `limit`, `fresh`: as of [`mirror`].
///
/// Errors: as of [`mirror`]; the file for old data cannot be made.
pub fn backup(
    client: &mut Client,
    limit: Duration,
    wanted: &BackupRequest,
    fresh: &NewFiles,
    progress: &Progress,
) -> Result<Value, Failure> {
    let rest = match (wanted.sync.as_deref(), &wanted.bitmap) {
        (_, Some(_)) => Rest::There(MARKED),
        (Some("top"), None) => Rest::Below,
        _ => Rest::Nothing,
    };
    let target = prepare(client, limit, (&wanted.to, rest), fresh, progress)?;
    let fleece = fleecing_file(&wanted.fleece.dir)?;
    let command = Command::Backup(Backup {
        target: target.name,
        format: target.format.map(|format| format.name().to_owned()),
        protect_raw: target.protect_raw,
        sync: wanted.sync.clone(),
        bitmap: wanted.bitmap.clone(),
        fleece_max: wanted.fleece.max_of(1)?,
        job: wanted.to.terms.clone(),
    });
    let timeout = Timeout::Work(limit.max(ANSWER));
    client.call_with(&command, &[fleece.as_fd()], progress, timeout)
}

/// Makes the target, or looks at the one that is there.
fn prepare(
    client: &mut Client,
    limit: Duration,
    (wanted, rest): (&CopyTo, Rest),
    fresh: &NewFiles,
    progress: &Progress,
) -> Result<target::Target, Failure> {
    let stats = client.call(&Command::Stats, progress, Timeout::Answer(limit))?;
    let CopyTo { to, format, existing, .. } = wanted;
    let named = Named { to, format: *format, existing: *existing, rest };
    target::prepare(client, &named, &stats, fresh)
}
