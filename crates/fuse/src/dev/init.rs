//! The INIT exchange on `/dev/fuse`, before any queue runs.
//!
//! Promises: called once by the thread that mounts. Plain system calls: nothing else is in flight.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::negotiate::{InitAnswer, Negotiated, Profile, negotiate};
use crate::reply::ReplyBuf;
use crate::request::{Operation, Request};
use crate::{Error, ErrorKind};

/// The kernel queues INIT while it mounts, so it is there at once; longer than this means that it
/// is not going to come.
const INIT_WAIT: Duration = Duration::from_secs(5);

/// Waits for INIT and answers it.
///
/// Errors: [`ErrorKind::TransportMissing`] for a kernel that is too old, [`ErrorKind::System`].
pub(crate) fn answer_init(device: impl AsFd, profile: &Profile) -> Result<Negotiated, Error> {
    let device = device.as_fd();
    let mut frame = vec![0u8; profile.request_bytes_max()];
    let deadline = Instant::now() + INIT_WAIT;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::new(
                ErrorKind::System,
                "the kernel did not start the FUSE connection",
            ));
        }
        let timeout = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(1),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let _ = poll(&mut [PollFd::new(&device, PollFlags::IN)], Some(&timeout));
        let received = match rustix::io::read(device, &mut frame[..]) {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => continue,
            Err(errno) => return Err(failed("reading the FUSE device").errno(errno)),
        };
        let request = Request::parse(&frame[..received], received)
            .map_err(|error| failed("the first FUSE request").source(error))?;
        let mut reply = ReplyBuf::new();
        let unique = request.header.unique;
        let Operation::Init(init) = request.operation else {
            reply.set_error(unique, Errno::IO);
            let _ = rustix::io::write(device, reply.as_bytes());
            continue;
        };
        let answer = negotiate(&init, profile);
        match &answer {
            Ok(InitAnswer::Ready(out, _) | InitAnswer::Again(out)) => reply.set_body(unique, out),
            Err(_) => reply.set_error(unique, Errno::PROTO),
        }
        rustix::io::write(device, reply.as_bytes())
            .map_err(|errno| failed("answering the kernel's INIT").errno(errno))?;
        match answer {
            Ok(InitAnswer::Ready(_, negotiated)) => return Ok(negotiated),
            Ok(InitAnswer::Again(_)) => {}
            Err(too_old) => {
                return Err(Error::new(ErrorKind::TransportMissing, too_old.to_string())
                    .hint("use a newer kernel"));
            }
        }
    }
}

fn failed(what: &str) -> Error {
    Error::new(ErrorKind::System, format!("{what} failed"))
}
