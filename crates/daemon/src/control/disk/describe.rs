//! What a served disk is, where it is, who uses it and how it is: the answer to `describe`, which
//! `ringdisk ps` asks of every process.
//!
//! Promises: nothing here waits for storage or for clients. Control thread.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use ringdisk_disk::name::is_export;
use ringdisk_disk::{Disk, Format, Layer};
use serde_json::{Value, json};

use super::DiskControl;
use crate::control::jobs::Job;
use crate::failure::Failure;
use crate::helper;
use crate::metrics::{self, Cache, DiskFacts, JobFacts, Sample};
use crate::stopping::Stage;
use crate::terminal::visible;

/// Where clients find a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ServedAs {
    /// Not said.
    #[default]
    Unknown,
    /// As a file.
    Mount {
        /// Absolute.
        mountpoint: PathBuf,
        /// Number of the FUSE connection.
        connection: Option<u32>,
    },
    /// To a virtual machine.
    VhostUser {
        /// The socket.
        socket: PathBuf,
        /// Where NBD clients find it, too.
        nbd: Option<NbdPlace>,
    },
    /// To NBD clients.
    Nbd {
        /// What `ringdisk ctl` finds it by; `None`: nothing.
        target: Option<PathBuf>,
        /// All of its addresses.
        place: NbdPlace,
    },
}

/// Where NBD clients find a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NbdPlace {
    /// Where they connect, for people: `at 127.0.0.1:10809`.
    pub addresses: Vec<String>,
    /// The name that they ask for.
    pub export: String,
}

impl NbdPlace {
    /// For people: ` as 'NAME' at 127.0.0.1:10809`.
    pub fn text(&self) -> String {
        let name = match self.export.as_str() {
            "" => String::new(),
            name => format!(" as '{}'", visible(name)),
        };
        format!("{name} {}", self.addresses.join(", "))
    }
}

impl ServedAs {
    /// The kind for programs, and where it is for people and commands.
    pub(super) fn parts(&self) -> (&'static str, String) {
        match self {
            ServedAs::Unknown => ("unknown", String::new()),
            ServedAs::Mount { mountpoint, .. } => ("mount", mountpoint.display().to_string()),
            ServedAs::VhostUser { socket, .. } => ("vhost-user-blk", socket.display().to_string()),
            ServedAs::Nbd { target: Some(target), .. } => ("nbd", target.display().to_string()),
            ServedAs::Nbd { target: None, place } => ("nbd", place.text().trim().to_owned()),
        }
    }

    /// Where NBD clients find it.
    fn nbd(&self) -> Option<&NbdPlace> {
        match self {
            ServedAs::Nbd { place, .. } => Some(place),
            ServedAs::VhostUser { nbd, .. } => nbd.as_ref(),
            ServedAs::Mount { .. } | ServedAs::Unknown => None,
        }
    }

    /// Where else it is served, for people.
    fn also(&self) -> Option<String> {
        match self {
            ServedAs::VhostUser { nbd: Some(place), .. } => Some(format!("NBD{}", place.text())),
            ServedAs::Nbd { place, .. } if place.addresses.len() > 1 => {
                Some(format!("NBD{}", place.text()))
            }
            _ => None,
        }
    }
}

impl DiskControl {
    /// Says where the disk is served.
    #[must_use]
    pub fn served_as(self, served_as: ServedAs) -> DiskControl {
        DiskControl { served_as, ..self }
    }

    /// The name of the disk in the log: that which its errors have, too.
    pub(in crate::control) fn log_name(&self) -> String {
        match &self.served_as {
            ServedAs::Nbd { place, .. } => format!("NBD export '{}'", place.export.escape_debug()),
            _ => self.serving.report().name,
        }
    }

    /// Where the disk is served.
    pub fn place(&self) -> &ServedAs {
        &self.served_as
    }

    /// The answer.
    ///
    /// Errors: the disk is served no longer.
    pub(super) fn describe(&self) -> Result<Value, Failure> {
        let disk = self.disk()?;
        let report = self.serving.report();
        let (kind, place) = self.served_as.parts();
        let (state, why) = self.state(&disk);
        let since = self.since.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let connection = match &self.served_as {
            ServedAs::Mount { connection, .. } => *connection,
            _ => None,
        };
        Ok(json!({
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "image": image_name(&disk, report.name),
            "format": top_format(&disk),
            "size": disk.size().0,
            "read-only": disk.is_read_only(),
            "kind": kind,
            "where": place,
            "also": self.served_as.also(),
            "connection": connection,
            "since": since,
            "state": state,
            "why": why,
            "clients": self.clients(),
            "jobs": self.jobs.running().iter().map(|job| job.to_json()).collect::<Value>(),
            "sandbox": self.sandbox.get(),
        }))
    }

    /// The samples for Prometheus; none when the disk is served no longer.
    pub fn samples(&self) -> Vec<Sample> {
        let Ok(disk) = self.disk() else { return Vec::new() };
        let report = self.serving.report();
        let (kind, target) = self.served_as.parts();
        let layers = disk.layers();
        let caches = layers.iter().filter_map(|layer| {
            let counters = layer.qcow2()?.cache_counters();
            Some(Cache {
                image: layer.name().to_string_lossy().into_owned(),
                loads: counters.loads,
                evictions: counters.evictions,
                capacity_bytes: counters.capacity_bytes.0,
            })
        });
        let facts = DiskFacts {
            image: image_name(&disk, report.name.clone()),
            target,
            kind,
            format: top_format(&disk),
            size: disk.size().0,
            is_healthy: is_well(self.state(&disk).0),
            since: self.since.duration_since(UNIX_EPOCH).unwrap_or_default(),
            clients: (kind != "mount").then(|| self.clients().len()),
            waits: disk.limit_waits(),
            device_errors: report.device.as_ref().map(|device| report.io_errors(device)),
            jobs: self.jobs.running().iter().map(|job| job_facts(job)).collect(),
            caches: caches.collect(),
        };
        metrics::samples(&facts, &report.total())
    }

    /// Why the disk is not served as it should be; `None`: it is, or it has ended.
    pub fn not_ready(&self) -> Option<String> {
        let disk = self.disk().ok()?;
        match self.state(&disk) {
            (word, _) if is_well(word) => None,
            (word, why) => Some(format!("{}: {word}: {}", self.served_as.parts().1, why?)),
        }
    }

    /// One word for programs, and why it is so.
    fn state(&self, disk: &Arc<Disk>) -> (&'static str, Option<String>) {
        if let Some(fault) = disk.fault() {
            return ("fault", Some(fault));
        }
        let reason = self.serving.report().device.and_then(|device| device.broken_reason);
        if let Some(reason) = reason {
            return ("needs-reset", Some(reason));
        }
        match self.stopping.as_ref().map(|stage| stage.stage()) {
            Some(Stage::InUse(users)) => {
                return ("stopping", Some(format!("it goes on until closed by {users}")));
            }
            Some(Stage::Ended) => return ("ended", None),
            _ => {}
        }
        if !disk.is_active() {
            let why = "it holds requests back, as its images are with another process until a \
                       front end starts the disk here (a migration)";
            return (INACTIVE, Some(String::from(why)));
        }
        match self.sandbox.get().is_some() && helper::is_gone() {
            true => {
                let why = "its helper process is gone: it can neither unmount, nor reconnect, nor \
                           make overlays by itself";
                ("helper-gone", Some(String::from(why)))
            }
            false => ("serving", None),
        }
    }

    /// Programs that use the disk over a socket.
    fn clients(&self) -> Vec<Value> {
        let export = self.served_as.nbd().map(|place| &place.export);
        let clients = self.serving.clients().into_iter();
        let ours =
            clients.filter(|client| client.export.is_none() || client.export.as_ref() == export);
        ours.map(|client| json!({ "pid": client.pid, "address": client.address })).collect()
    }
}

/// A disk that is not owned: before a migration to this process, and after one from it.
const INACTIVE: &str = "inactive";

/// Whether nothing is wrong with a disk in this state.
fn is_well(state: &str) -> bool {
    ["serving", INACTIVE].contains(&state)
}

/// What metrics say of a job.
fn job_facts(job: &Job) -> JobFacts {
    JobFacts {
        id: job.id().to_owned(),
        kind: job.kind().word(),
        state: job.state().word(),
        done: job.progress().done().0,
        total: job.progress().total().0,
        rate: job.rate(),
        speed: job.progress().speed(),
    }
}

/// The image as the user named it; one that is used no longer, after a switch-over, say, is not
/// told any more, but the one on top.
///
/// * `name`: absolute, or the address of an export; `null` without one.
fn image_name(disk: &Disk, name: String) -> String {
    let layers = disk.layers();
    let is_it = |layer: &Arc<Layer>| {
        let own = layer.name();
        own == Path::new(&name) || std::path::absolute(own).is_ok_and(|own| own == Path::new(&name))
    };
    match layers.first().filter(|top| top.file().is_some()) {
        Some(top) if !layers.iter().any(is_it) => {
            let own = top.name();
            let whole = if is_export(own) { None } else { std::path::absolute(own).ok() };
            whole.unwrap_or_else(|| own.to_owned()).to_string_lossy().into_owned()
        }
        _ => name,
    }
}

/// The format of the image on top.
fn top_format(disk: &Disk) -> Option<&'static str> {
    disk.layers().first().and_then(|top| top.format()).map(Format::name)
}

/// When a control was made.
pub(super) fn now() -> SystemTime {
    SystemTime::now()
}
