//! The sockets that front ends come through: made, inherited, or those of front ends.
//!
//! Promises: nothing that somebody uses, and nothing that is no socket, is ever replaced; what was
//! made goes at the end, if it is still the one that was made. Control path.

mod inherited;
mod made;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use ringdisk_vhost::Listen;

use crate::cli::{ServedDisk, SocketArgs};
use crate::control::place::{PATH_BYTES_MAX, real_path};
use crate::report::{Exit, Failure};
use crate::terminal::shell_word;

pub(crate) use inherited::{Inherited, take};
pub(crate) use made::{MadeSocket, group};

/// Where the front ends of one disk come from, before anything is made.
#[derive(Debug)]
pub(crate) enum Place {
    /// A socket that we make.
    Make { path: PathBuf, mode: u32, group: Option<u32> },
    /// One that was there when we were started.
    Inherited(Inherited),
    /// One of the front end.
    Connect(PathBuf),
    /// That of the process that serves the disk now, whether it listens there or connects.
    Take(PathBuf),
}

/// Where the front ends of one disk come from.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) listen: Listen,
    /// The path of the socket, if it has one: `ringdisk ctl` finds the disk by it.
    pub(crate) path: Option<PathBuf>,
    /// Removes what was made.
    pub(crate) made: Option<MadeSocket>,
}

/// The places of all disks, and what was inherited but for none of them is an error.
///
/// Errors: no place, too few or too many inherited sockets, paths that cannot be.
pub(crate) fn places(
    disks: &[ServedDisk],
    inherited: Vec<Option<Inherited>>,
) -> Result<Vec<Place>, Failure> {
    disks
        .iter()
        .zip(inherited)
        .map(|(disk, inherited)| place(&disk.args.place, inherited))
        .collect()
}

/// The places of all disks that are served by another process now.
///
/// Errors: a disk whose socket has no path.
pub(crate) fn taken_places(
    disks: &[ServedDisk],
    inherited: Vec<Option<Inherited>>,
) -> Result<Vec<Place>, Failure> {
    let place = |(disk, inherited): (&ServedDisk, Option<Inherited>)| {
        let args = &disk.args.place;
        let path = args.vhost_user_blk.clone().or_else(|| args.connect.clone());
        let path = path.or_else(|| inherited.and_then(|inherited| inherited.path));
        path.map(Place::Take).ok_or_else(|| {
            Failure::new(Exit::Usage, "--upgrade finds the disk by the path of its socket")
                .hint("--vhost-user-blk /run/vm1.sock")
        })
    };
    disks.iter().zip(inherited).map(place).collect()
}

fn place(args: &SocketArgs, inherited: Option<Inherited>) -> Result<Place, Failure> {
    if let Some(inherited) = inherited {
        return Ok(Place::Inherited(inherited));
    }
    if let Some(path) = &args.connect {
        check_path(path)?;
        return Ok(Place::Connect(path.clone()));
    }
    let Some(path) = &args.vhost_user_blk else {
        return Err(Failure::new(Exit::Usage, "it is not said where the disk is to be served")
            .hint("--vhost-user-blk /run/vm1.sock"));
    };
    check_path(path)?;
    let group = args.socket_group.as_deref().map(made::group).transpose()?;
    let mode = args.socket_mode.unwrap_or(if group.is_some() { 0o660 } else { 0o600 });
    made::check(path)?;
    Ok(Place::Make { path: path.clone(), mode, group })
}

/// Errors: the path is longer than the system takes, or its directory is missing.
fn check_path(path: &Path) -> Result<(), Failure> {
    let shown = path.display();
    let len = path.as_os_str().len();
    if len == 0 {
        return Err(Failure::new(Exit::Usage, "the path of a socket is empty"));
    }
    if len > PATH_BYTES_MAX {
        return Err(Failure::new(
            Exit::Mountpoint,
            format!("the path of the socket '{shown}' has {len} bytes; the system takes {PATH_BYTES_MAX}"),
        )
        .hint("give a shorter one, such as /run/vm1.sock, or one relative to its directory"));
    }
    let directory = match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    };
    match directory.metadata() {
        Ok(meta) if meta.is_dir() => Ok(()),
        Ok(_) => Err(Failure::new(
            Exit::Mountpoint,
            format!(
                "the socket '{shown}' cannot be made: '{}' is no directory",
                directory.display()
            ),
        )
        .hint("give another name")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let shown = directory.display().to_string();
            Err(Failure::new(Exit::Mountpoint, format!("the directory '{shown}' does not exist"))
                .hint(format!("mkdir -p {}", shell_word(&shown))))
        }
        Err(error) => {
            let doing = format!("cannot use the directory of the socket '{shown}'");
            Err(Failure::system(doing, &error, Exit::Mountpoint))
        }
    }
}

impl Place {
    /// Makes what is to be made.
    ///
    /// Errors: the socket is somebody's, or cannot be made.
    pub(crate) fn open(self) -> Result<Opened, Failure> {
        match self {
            Place::Make { path, mode, group } => {
                let (listener, made) = MadeSocket::make(&path, mode, group)?;
                let path = real_path(&path).ok();
                Ok(Opened { listen: Listen::Listener(listener), path, made: Some(made) })
            }
            Place::Inherited(Inherited { socket, path, listens, .. }) => {
                let listen: fn(OwnedFd) -> Listen =
                    if listens { Listen::Listener } else { Listen::Stream };
                Ok(Opened { listen: listen(socket), path, made: None })
            }
            Place::Connect(path) | Place::Take(path) => {
                let real = real_path(&path).ok();
                // The process may leave its directory, and connects again later.
                let path = std::path::absolute(&path)
                    .ok()
                    .filter(|whole| whole.as_os_str().len() <= PATH_BYTES_MAX)
                    .unwrap_or(path);
                Ok(Opened { listen: Listen::Connect(path), path: real, made: None })
            }
        }
    }

    /// As the user knows it, in "is served ...".
    pub(crate) fn shown(&self) -> String {
        match self {
            Place::Make { path, .. } => format!("at {}", path.display()),
            Place::Connect(path) => format!("to whoever listens at {}", path.display()),
            Place::Take(path) => format!("at {}", path.display()),
            Place::Inherited(Inherited { path: Some(path), .. }) => {
                format!("at {}", path.display())
            }
            Place::Inherited(Inherited { shown, .. }) => format!("over {shown}"),
        }
    }
}

#[cfg(test)]
mod tests;
