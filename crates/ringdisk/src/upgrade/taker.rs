//! The new process: asks for the disk, and takes it.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use ringdisk_vhost::export::Parcel;

use super::link::Refusal;
use super::{ASK, GO, READY, STEP, Shown, link};
use crate::control::place::{candidates, name_for_successor, user};
use crate::report::{Exit, Failure};

/// The old process, which stands still until this is dropped.
#[derive(Debug)]
pub(crate) struct Offer(UnixStream);

/// The old process, which serves no longer.
#[derive(Debug)]
pub(crate) struct Predecessor(UnixStream);

/// Asks the process that serves a disk for it. Its guest stands still from now on.
///
/// * `path`: of the vhost-user socket, as [`crate::control::place::real_path`] gives it.
/// * `shown`: what this process would show to the guest.
///
/// Errors: nobody serves there; it cannot be had now; the guest has been shown something else.
pub(crate) fn ask(path: &Path, shown: &Shown) -> Result<(Parcel, Offer), Failure> {
    let name = path.display();
    let nobody = || {
        Failure::new(Exit::Mountpoint, format!("no ringdisk serves a disk at '{name}'"))
            .hint("start without --upgrade")
    };
    let found = candidates(&name_for_successor(path), user());
    let stream = found.iter().find_map(|place| UnixStream::connect(place).ok());
    let stream = stream.ok_or_else(nobody)?;
    let doing = || format!("the process that serves '{name}' did not hand it over");
    let failed = |error: io::Error| Failure::system(doing(), &error, Exit::General);
    stream.set_read_timeout(Some(STEP)).map_err(failed)?;
    stream.set_write_timeout(Some(STEP)).map_err(failed)?;
    (&stream).write_all(&[ASK]).map_err(failed)?;
    link::send_shown(&stream, shown).map_err(failed)?;
    match link::receive(&stream).map_err(failed)? {
        Ok(parcel) => Ok((parcel, Offer(stream))),
        Err(Refusal::Now(why)) => Err(Failure::new(Exit::General, format!("{}: {why}", doing()))
            .hint("it goes on as before; try again later")),
        Err(Refusal::Unlike(why)) => {
            let text = format!("{}: the guest would find another disk: {why}", doing());
            Err(Failure::new(Exit::Usage, text).hint(
                "it goes on as before; --upgrade takes the words that it was started with, and what the guest sees \
                 changes only when it is stopped and started anew",
            ))
        }
    }
}

impl Offer {
    /// Everything is prepared: the old process ends, and its successor goes on.
    ///
    /// Errors: the old process goes on.
    pub(crate) fn take(mut self) -> Result<Predecessor, Failure> {
        let mut take = || -> io::Result<()> {
            self.0.write_all(&[READY])?;
            let mut word = [0];
            self.0.read_exact(&mut word)?;
            if word == [GO] { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) }
        };
        take().map_err(|error| {
            Failure::system("the disk was not handed over in time", &error, Exit::General)
        })?;
        Ok(Predecessor(self.0))
    }
}

impl Predecessor {
    /// Waits until the old process is gone, for a while: names that it had are free then.
    pub(crate) fn wait(mut self) {
        let _ = self.0.read(&mut [0]);
    }
}
