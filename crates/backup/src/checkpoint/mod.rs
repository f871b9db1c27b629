//! Checkpoints of disks that other processes serve: begun at one instant, and ended.
//!
//! Promises: what the serving processes may not make inside their sandboxes is made here and given
//! to them: fleecing files and listening sockets. A begin that fails leaves neither behind.

mod exports;
mod list;

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ringdisk_daemon::control::checkpoint::round::{self, Begun, Part, fleecing_file, free_bytes};
use ringdisk_daemon::control::client::{Client, Timeout};
use ringdisk_daemon::control::protocol::Command;
use ringdisk_daemon::control::protocol::checkpoint::{Begin, Bitmaps, Dirty, End, Listed};
use ringdisk_daemon::control::registry;
use ringdisk_daemon::failure::{Exit, Failure};
use ringdisk_daemon::sockets::Address;
use ringdisk_daemon::terminal::{self, visible};
use ringdisk_disk::Progress;
use serde_json::Value;

pub use exports::names;
use exports::{Places, Sockets};
pub use list::{Bitmap, Image, ask, listed, look};

/// How long the end of a checkpoint may take: the bitmaps are written.
const END_LIMIT: Duration = Duration::from_secs(60);

/// Ranges of a disk, in bytes.
pub type Ranges = Arc<[Range<u64>]>;

/// A disk of a checkpoint before it begins.
#[derive(Debug)]
pub struct Target {
    /// Its server.
    pub client: Client,
    /// As the user named it.
    pub path: PathBuf,
    /// See [`Begin::bitmap`].
    pub bitmap: Option<String>,
    /// See [`Begin::since`].
    pub since: Option<String>,
}

/// Where old data of disks goes while their kept state is read.
#[derive(Clone, Debug)]
pub struct Fleece {
    /// Where the files without a name are made.
    pub dir: PathBuf,
    /// Most old data of each disk, bytes; `None`: half of what is free there, shared by the disks.
    pub max: Option<u64>,
}

impl Fleece {
    /// Most old data of each disk, bytes.
    ///
    /// * `disks`: how many share the directory.
    ///
    /// Errors: the directory cannot be looked at.
    pub fn max_of(&self, disks: usize) -> Result<u64, Failure> {
        if let Some(max) = self.max {
            return Ok(max);
        }
        let free = free_bytes(&self.dir).map_err(|error| {
            let doing = format!("cannot look at the directory '{}'", self.dir.display());
            Failure::system(doing, &error, Exit::Usage).hint("--fleece-dir names another directory")
        })?;
        Ok(free / 2 / disks.max(1) as u64)
    }
}

/// Listens at an address of TCP, on all addresses of its host.
///
/// Errors: none of them can be listened on.
pub type Listen = fn(&Address) -> Result<Vec<OwnedFd>, Failure>;

/// What is asked for of all disks.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// Of the checkpoint.
    pub name: &'a str,
    /// Where readers find the disks of the first process; `None`: a Unix socket of our own.
    pub address: Option<&'a Address>,
    /// How addresses of TCP are listened at.
    pub listen: Listen,
    /// Where old data goes.
    pub fleece: &'a Fleece,
    /// It ends with this process.
    pub is_leased: bool,
}

/// A checkpoint of several disks. Dropping it leaves it there, unless it is leased.
#[derive(Debug)]
pub struct Checkpoint {
    /// In the order of the targets.
    pub disks: Vec<Begun>,
    sockets: Sockets,
}

/// Begins a checkpoint of all targets at one instant.
///
/// Errors: why it is not there; no disk has it then.
pub fn begin(
    targets: Vec<Target>,
    wanted: &Wanted<'_>,
    progress: &Progress,
) -> Result<Checkpoint, Failure> {
    let paths: Vec<String> = targets.iter().map(whole).collect::<Result<_, _>>()?;
    for (number, path) in paths.iter().enumerate() {
        if paths[..number].contains(path) {
            let text = format!("the disk '{}' is named twice", visible(path));
            return Err(Failure::new(Exit::Usage, text));
        }
    }
    let id = new_id()?;
    let fleece_max = wanted.fleece.max_of(targets.len())?;
    let names: Vec<&Path> = targets.iter().map(|target| target.path.as_path()).collect();
    let names = exports::names(&names);
    let places = Places::new(&targets, wanted.address, wanted.name, &id)?;
    let mut sockets = Sockets::default();
    let mut parts = Vec::with_capacity(targets.len());
    for ((number, target), export) in targets.into_iter().enumerate().zip(names) {
        let listening = places.listen(number, &mut sockets, wanted.listen)?;
        let begin = Begin {
            name: wanted.name.to_owned(),
            id: id.clone(),
            uri: places.uri(number, &export)?,
            export,
            bitmap: target.bitmap,
            since: target.since,
            fleece_max,
            targets: paths.clone(),
            socket: listening.path,
            listeners: listening.listeners.len(),
            is_leased: wanted.is_leased,
        };
        let (client, fleece) = (target.client, fleecing_file(&wanted.fleece.dir)?);
        parts.push(Part { client, begin, fleece, listeners: listening.listeners });
    }
    let disks = round::begin(parts, progress)?;
    Ok(Checkpoint { disks, sockets })
}

impl Checkpoint {
    /// Leaves it there: its servers have the sockets, whose names stay.
    pub fn leave(self) {
        self.sockets.leave();
    }

    /// Ends it for all disks. The first failure counts; the others are told.
    ///
    /// Errors: the bitmaps could not be changed; a server is gone.
    pub fn end(self, bitmaps: Bitmaps) -> Result<(), Failure> {
        let mut result = Ok(());
        for Begun { mut client, begin, lease, .. } in self.disks {
            let ended = end_one(&mut client, &begin.name, Some(begin.id), bitmaps);
            drop(lease);
            let context = |failure: Failure| failure.context(format!("'{}'", client.target_name()));
            let ended = ended.map(|_| ()).map_err(context);
            match (&result, ended) {
                (Ok(()), ended) => result = ended,
                (Err(_), Err(failure)) => terminal::warn(failure.message()),
                (Err(_), Ok(())) => {}
            }
        }
        result
    }

    /// What the bitmap of a disk has marked. `None`: no bitmap was asked for.
    ///
    /// * `number`: of the disk.
    ///
    /// Errors: those of the server.
    pub fn dirty(&mut self, number: usize) -> Result<Option<Ranges>, Failure> {
        let Begun { client, begin, .. } = &mut self.disks[number];
        if begin.since.is_none() {
            return Ok(None);
        }
        let mut all: Vec<Range<u64>> = Vec::new();
        loop {
            let command =
                Command::CheckpointDirty(Dirty { name: begin.name.clone(), first: all.len() });
            let mut value = client.call(&command, &Progress::new(), Timeout::Answer(END_LIMIT))?;
            let ranges = value.get_mut("ranges").map(Value::take).unwrap_or_default();
            let ranges: Vec<(u64, u64)> = serde_json::from_value(ranges).map_err(|error| {
                let text = format!("what the server said makes no sense: {error}");
                Failure::new(Exit::General, text)
            })?;
            let is_last = value.get("more") != Some(&Value::Bool(true)) || ranges.is_empty();
            all.extend(ranges.into_iter().map(|(start, end)| start..end));
            if is_last {
                return Ok(Some(all.into()));
            }
        }
    }

    /// Why a disk cannot be read any more; looked at while the checkpoint is there.
    pub fn failed(&mut self) -> Option<String> {
        self.disks.iter_mut().find_map(|disk| {
            let all = listed(&mut disk.client, END_LIMIT).ok()?.0;
            let this = all.into_iter().find(|listed| listed.id == disk.begin.id);
            match this {
                Some(listed) => listed.failed.as_deref().map(visible),
                None => Some(String::from("the checkpoint has ended")),
            }
        })
    }
}

/// Ends the checkpoint of one disk. Gives why it could not be read any more, if so.
fn end_one(
    client: &mut Client,
    name: &str,
    id: Option<String>,
    bitmaps: Bitmaps,
) -> Result<Option<String>, Failure> {
    let command = Command::CheckpointEnd(End { name: name.to_owned(), id, bitmaps });
    let value = client.call(&command, &Progress::new(), Timeout::Work(END_LIMIT))?;
    Ok(value.get("failed").and_then(Value::as_str).map(visible))
}

/// Ends a checkpoint by its name, for all its disks.
///
/// * `path`: one of the disks.
/// * `limit`: for each answer.
///
/// Errors: those of the disk that is named; what is wrong with others is told.
pub fn end(path: &Path, limit: Duration, name: &str, bitmaps: Bitmaps) -> Result<(), Failure> {
    let mut client = Client::connect(path, limit)?;
    let (all, _) = listed(&mut client, limit)?;
    let Some(first) = all.into_iter().find(|listed| listed.name == name) else {
        // The server says so best.
        return end_one(&mut client, name, None, bitmaps).map(|_| ());
    };
    let mut sockets: Vec<String> = first.socket.clone().into_iter().collect();
    let tell = |target: &str, failed: Option<String>| {
        if let Some(why) = failed {
            let kept = match bitmaps {
                Bitmaps::Drop => "; its bitmaps were merged, as by --merge",
                Bitmaps::Keep | Bitmaps::Merge => "",
            };
            terminal::warn(format_args!("{target}: the checkpoint could not be read: {why}{kept}"));
        }
    };
    let ended = end_one(&mut client, name, Some(first.id.clone()), bitmaps);
    let own = path.display().to_string();
    let result = ended.map(|failed| tell(&own, failed));
    for other in &first.targets {
        let other = Path::new(other);
        match end_other(other, limit, (&first, name, bitmaps)) {
            Ok(Some((socket, failed))) => {
                sockets.extend(socket);
                tell(&visible(&other.display().to_string()), failed);
            }
            Ok(None) => {}
            Err(failure) => {
                let other = visible(&other.display().to_string());
                terminal::warn(format_args!("{other}: {}", failure.message()));
            }
        }
    }
    for socket in sockets {
        exports::remove_left(Path::new(&socket));
    }
    result
}

/// Ends it for another disk that has it, too. `None`: that one has ended it, or its server.
#[allow(clippy::type_complexity)] // Its socket, and why it could not be read.
fn end_other(
    path: &Path,
    limit: Duration,
    (first, name, bitmaps): (&Listed, &str, Bitmaps),
) -> Result<Option<(Option<String>, Option<String>)>, Failure> {
    let Ok(mut client) = Client::connect(path, limit) else { return Ok(None) };
    let (all, _) = listed(&mut client, limit)?;
    let Some(same) = all.into_iter().find(|listed| listed.id == first.id) else { return Ok(None) };
    let failed = end_one(&mut client, name, Some(first.id.clone()), bitmaps)?;
    Ok(Some((same.socket, failed)))
}

/// The path by which a target is found from anywhere.
fn whole(target: &Target) -> Result<String, Failure> {
    let path = match &target.client.mountpoint {
        Some(mountpoint) => mountpoint.clone(),
        None => registry::real_path(&target.path).unwrap_or_else(|_| target.path.clone()),
    };
    path.into_os_string().into_string().map_err(|path| {
        let text = format!("the name '{}' is not UTF-8", path.to_string_lossy());
        Failure::new(Exit::Usage, text)
    })
}

/// A number that nobody guesses, as text.
fn new_id() -> Result<String, Failure> {
    let mut bytes = [0; 16];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| Failure::system("cannot read /dev/urandom", &error, Exit::General))?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bytes)))
}
