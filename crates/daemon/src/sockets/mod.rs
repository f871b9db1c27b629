//! The sockets that front ends come through: made, inherited, or those of front ends.
//!
//! Promises: a socket on which a process listens, and a file that is no socket, are never replaced;
//! a socket that was made here is removed at the end, if its name still leads to it. Control path.

mod address;
mod bind;
mod inherited;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

pub use address::Address;
pub use bind::{MadeSocket, group};
pub use inherited::{GivenListener, Inherited, take, take_listeners};
use ringdisk_vhost::Listen;

use crate::control::registry::{PATH_BYTES_MAX, real_path};
use crate::failure::{Exit, Failure};
use crate::terminal::shell_word;

/// What the command line says about where the front ends of one disk come from. At most one of the
/// first three is there.
#[derive(Clone, Debug, Default)]
pub struct SocketOptions {
    /// The socket to make.
    pub make: Option<PathBuf>,
    /// The socket of a front end that listens.
    pub connect: Option<PathBuf>,
    /// Number of a descriptor that was there when the process was started.
    pub descriptor: Option<i32>,
    /// Name of a socket that the service manager passes.
    pub name: Option<String>,
    /// Mode of the socket that is made.
    pub mode: Option<u32>,
    /// Its group: a name or a number.
    pub group: Option<String>,
}

/// Where the front ends of one disk come from, before anything is made.
#[derive(Debug)]
pub enum Place {
    /// A socket that we make.
    Make {
        /// Its path.
        path: PathBuf,
        /// Who may connect, as chmod(2) has it.
        mode: u32,
        /// Number of its group; `None`: that of the process.
        group: Option<u32>,
    },
    /// One that was there when we were started.
    Inherited(Inherited),
    /// One of the front end.
    Connect(PathBuf),
    /// That of the process that serves the disk now, whether it listens there or connects.
    Take(PathBuf),
}

/// Where the front ends of one disk come from.
#[derive(Debug)]
pub struct Opened {
    /// The socket, or where it is.
    pub listen: Listen,
    /// The path of the socket, if it has one: `ringdisk ctl` finds the disk by it.
    pub path: Option<PathBuf>,
    /// Removes what was made.
    pub made: Option<MadeSocket>,
}

/// The places of all disks, and what was inherited but for none of them is an error.
///
/// Errors: no place, too few or too many inherited sockets, paths that cannot be.
pub fn places(
    disks: &[SocketOptions],
    inherited: Vec<Option<Inherited>>,
) -> Result<Vec<Place>, Failure> {
    disks.iter().zip(inherited).map(|(options, inherited)| place(options, inherited)).collect()
}

/// The places of all disks that are served by another process now.
///
/// Errors: a disk whose socket has no path.
pub fn taken_places(
    disks: &[SocketOptions],
    inherited: Vec<Option<Inherited>>,
) -> Result<Vec<Place>, Failure> {
    let place = |(options, inherited): (&SocketOptions, Option<Inherited>)| {
        let path = options.make.clone().or_else(|| options.connect.clone());
        let path = path.or_else(|| inherited.and_then(|inherited| inherited.path));
        path.map(Place::Take).ok_or_else(|| {
            Failure::new(Exit::Usage, "--upgrade finds the disk by the path of its socket")
                .hint("--vhost-user-blk /run/vm1.sock")
        })
    };
    disks.iter().zip(inherited).map(place).collect()
}

fn place(options: &SocketOptions, inherited: Option<Inherited>) -> Result<Place, Failure> {
    if let Some(inherited) = inherited {
        return Ok(Place::Inherited(inherited));
    }
    if let Some(path) = &options.connect {
        check_path(path)?;
        return Ok(Place::Connect(path.clone()));
    }
    let Some(path) = &options.make else {
        return Err(Failure::new(Exit::Usage, "it is not said where the disk is to be served")
            .hint("--vhost-user-blk /run/vm1.sock, or --nbd unix:/run/disk.sock"));
    };
    check_path(path)?;
    let group = options.group.as_deref().map(bind::group).transpose()?;
    let mode = options.mode.unwrap_or(if group.is_some() { 0o660 } else { 0o600 });
    bind::check(path)?;
    Ok(Place::Make { path: path.clone(), mode, group })
}

/// Errors: the path is longer than the system takes, or its directory is missing.
fn check_path(path: &Path) -> Result<(), Failure> {
    let display_name = path.display();
    let len = path.as_os_str().len();
    if len == 0 {
        return Err(Failure::new(Exit::Usage, "the path of a socket is empty"));
    }
    if len > PATH_BYTES_MAX {
        return Err(Failure::new(
            Exit::Mountpoint,
            format!(
                "the path of the socket '{display_name}' has {len} bytes; the system takes \
                {PATH_BYTES_MAX}"
            ),
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
                "the socket '{display_name}' cannot be made: '{}' is no directory",
                directory.display()
            ),
        )
        .hint("give another name")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let display_name = directory.display().to_string();
            Err(Failure::new(
                Exit::Mountpoint,
                format!("the directory '{display_name}' does not exist"),
            )
            .hint(format!("mkdir -p {}", shell_word(&display_name))))
        }
        Err(error) => {
            let doing = format!("cannot use the directory of the socket '{display_name}'");
            Err(Failure::system(doing, &error, Exit::Mountpoint))
        }
    }
}

impl Place {
    /// Makes what is to be made.
    ///
    /// Errors: another process listens there; the socket cannot be made.
    pub fn open(self) -> Result<Opened, Failure> {
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

    /// The place as messages name it, after "is served".
    pub fn display_name(&self) -> String {
        match self {
            Place::Make { path, .. } => format!("at {}", path.display()),
            Place::Connect(path) => format!("to the process that listens at {}", path.display()),
            Place::Take(path) => format!("at {}", path.display()),
            Place::Inherited(Inherited { path: Some(path), .. }) => {
                format!("at {}", path.display())
            }
            Place::Inherited(Inherited { display_name, .. }) => format!("over {display_name}"),
        }
    }
}

#[cfg(test)]
mod tests;
