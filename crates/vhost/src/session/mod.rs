//! A session: what one front end has said, and what follows from it.
//!
//! Promises: no socket, no thread, nothing waits here except in the back end. Whatever a front end
//! sends, the answer is a reply, a refusal, or an error that ends this connection; it never panics,
//! and what it can make us keep is bounded by the limits in [`SessionConfig`]. Called by the
//! control thread.
//!
//! - A virtqueue runs while it has a kick eventfd and is enabled. SET_VRING_ENABLE 0 drains it, and
//!   it goes on where it was; GET_VRING_BASE ends it. Without F_PROTOCOL_FEATURES rings are enabled
//!   from the beginning.
//! - A message that could not be done is refused: by a reply if it has one or asked for one,
//!   otherwise by the end of the connection, because the front end would go on as if it had been
//!   done.
//! - Messages that need a protocol feature are refused without it. Beyond that no order is
//!   enforced: the front ends that exist differ.

mod backend;
mod hand_over;
mod regions;
mod requests;
mod vring;

use std::os::fd::OwnedFd;

pub use backend::{
    Backend, ConfigWrite, InflightArea, Refusal, RegionSetup, StateDirection, VringSetup,
};
pub use hand_over::{SavedVring, SessionState};
use regions::Regions;
use vring::Vring;

use crate::protocol::features;
use crate::protocol::{Header, Malformed, Message, Reply, Request};
use crate::{Error, ErrorKind};

/// What a session offers, and its limits.
#[derive(Clone, Copy, Debug)]
pub struct SessionConfig {
    /// Virtio features that the device offers. F_PROTOCOL_FEATURES is added, and F_LOG_ALL if there
    /// is LOG_SHMFD.
    pub features: u64,
    /// Protocol features; what this crate does not implement is left out.
    pub protocol_features: u64,
    /// Virtqueues, 1 to 256.
    pub queues_max: u16,
    /// Entries of a virtqueue, at most 32768.
    pub queue_size_max: u16,
    /// Regions of guest memory at one time.
    pub mem_slots_max: u16,
}

/// What came of a message.
#[derive(Debug)]
pub struct Answer {
    /// What to send.
    pub reply: Option<Reply>,
    /// Why it was not done, with the name of the message; for the log.
    pub refused: Option<String>,
}

/// Why a request was not done.
enum Fault {
    Malformed(Malformed),
    Refused(String),
}

impl From<Malformed> for Fault {
    fn from(malformed: Malformed) -> Fault {
        Fault::Malformed(malformed)
    }
}

impl From<Refusal> for Fault {
    fn from(refusal: Refusal) -> Fault {
        Fault::Refused(refusal.to_string())
    }
}

impl From<String> for Fault {
    fn from(reason: String) -> Fault {
        Fault::Refused(reason)
    }
}

/// What one front end has said.
#[derive(Debug)]
pub struct Session {
    config: SessionConfig,
    features: u64,
    protocol_features: u64,
    status: u8,
    /// SET_OWNER or SET_FEATURES has come.
    claimed: bool,
    regions: Regions,
    vrings: Vec<Vring>,
}

impl Session {
    /// A session at its beginning.
    #[must_use]
    pub fn new(mut config: SessionConfig) -> Session {
        config.protocol_features &= features::ALL;
        config.features |= features::F_PROTOCOL_FEATURES;
        if config.protocol_features & features::LOG_SHMFD != 0 {
            config.features |= features::F_LOG_ALL;
        }
        let vrings = (0..config.queues_max).map(|_| Vring::default()).collect();
        let regions = Regions::default();
        Session {
            config,
            features: 0,
            protocol_features: 0,
            status: 0,
            claimed: false,
            regions,
            vrings,
        }
    }

    /// The virtio features that were negotiated.
    #[must_use]
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The protocol features that were negotiated.
    #[must_use]
    pub fn protocol_features(&self) -> u64 {
        self.protocol_features
    }

    /// Whether the front end has said that the device is its own. All that exist do so at once;
    /// further they may go only when a guest has a driver (QEMU sends features no earlier).
    #[must_use]
    pub fn is_claimed(&self) -> bool {
        self.claimed
    }

    /// Virtqueues that run.
    #[must_use]
    pub fn running(&self) -> usize {
        self.vrings.iter().filter(|vring| vring.running).count()
    }

    /// Entries of a virtqueue; 0: the front end has not said it.
    pub(crate) fn size_of(&self, index: u16) -> u16 {
        self.vrings.get(usize::from(index)).and_then(|vring| vring.size).unwrap_or(0)
    }

    /// Does what a message asks for.
    ///
    /// * `payload`: `header.size` bytes.
    /// * `fds`: what came with it; those that are not used are closed.
    ///
    /// Errors: this connection is to end, after [`Session::close`].
    pub fn handle(
        &mut self,
        backend: &mut dyn Backend,
        header: &Header,
        payload: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Answer, Error> {
        // Whether an answer is due is decided by what was negotiated before this message.
        let acknowledge = header.need_reply() && self.negotiated(features::REPLY_ACK);
        let Some(request) = Request::from_number(header.request) else {
            drop(fds);
            let name = format!("request {}", header.request);
            header
                .check(&name)
                .map_err(|wrong| Error::new(ErrorKind::Protocol, wrong.to_string()))?;
            return refused(header, acknowledge, &name, "not known");
        };
        match self.request(backend, request, header, payload, fds) {
            Ok(None) if acknowledge => {
                Ok(Answer { reply: Some(Reply::number(header.request, 0)), refused: None })
            }
            Ok(reply) => Ok(Answer { reply, refused: None }),
            Err(Fault::Malformed(malformed)) => {
                Err(Error::new(ErrorKind::Protocol, malformed.to_string()))
            }
            Err(Fault::Refused(reason)) => self.refuse(header, payload, &reason),
        }
    }

    /// Answers a message that is not done.
    ///
    /// Errors: this connection is to end: the front end cannot be told otherwise.
    pub(crate) fn refuse(
        &self,
        header: &Header,
        payload: &[u8],
        reason: &str,
    ) -> Result<Answer, Error> {
        let acknowledge = header.need_reply() && self.negotiated(features::REPLY_ACK);
        let Some(request) = Request::from_number(header.request) else {
            return refused(header, acknowledge, "request", reason);
        };
        let name = request.name();
        let refused_as = Some(format!("{name}: {reason}"));
        match requests::refusal(request, header, payload) {
            requests::Learns::Reply(reply) => {
                Ok(Answer { reply: Some(reply), refused: refused_as })
            }
            requests::Learns::Nobody if !acknowledge => {
                Ok(Answer { reply: None, refused: refused_as })
            }
            requests::Learns::Nobody | requests::Learns::Acknowledge => {
                refused(header, acknowledge, name, reason)
            }
            requests::Learns::End => {
                Err(Error::new(ErrorKind::Refused, format!("{name}: {reason}")))
            }
        }
    }

    /// The connection is at its end: stops all rings and lets the back end go.
    pub fn close(&mut self, backend: &mut dyn Backend) {
        self.stop_all(backend);
        backend.disconnect();
        *self = Session::new(self.config);
    }

    fn request(
        &mut self,
        backend: &mut dyn Backend,
        request: Request,
        header: &Header,
        payload: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Option<Reply>, Fault> {
        let message = Message::parse(request, header, payload, fds)?;
        if !self.negotiated(request.feature()) {
            let name = features::name(request.feature());
            return Err(format!("{name} was not negotiated").into());
        }
        self.serve(backend, request as u32, message)
    }

    /// Whether all of these protocol features were negotiated.
    fn negotiated(&self, features: u64) -> bool {
        self.protocol_features & features == features
    }

    fn packed(&self) -> bool {
        self.features & features::F_RING_PACKED != 0
    }

    /// The place of a virtqueue.
    fn vring(&mut self, index: u32) -> Result<(u16, &mut Vring), Fault> {
        let queues = self.config.queues_max;
        let place = u16::try_from(index).ok().filter(|index| *index < queues);
        place.and_then(|place| Some((place, self.vrings.get_mut(usize::from(place))?))).ok_or_else(
            || Fault::Refused(format!("there is no virtqueue {index}, there are {queues}")),
        )
    }

    /// Runs or stops a virtqueue as its state says.
    fn settle(&mut self, backend: &mut dyn Backend, index: u16) -> Result<(), Fault> {
        let at_once = self.features & features::F_PROTOCOL_FEATURES == 0;
        let packed = self.packed();
        let known = self.regions.len();
        let (_, vring) = self.vring(u32::from(index))?;
        let wanted = vring.wanted(at_once);
        if wanted && !vring.running {
            if known == 0 {
                return Err(format!("virtqueue {index}: started without memory").into());
            }
            let setup = vring.setup(packed).map_err(|what| format!("virtqueue {index}: {what}"))?;
            backend.start_vring(index, setup)?;
            vring.running = true;
        } else if !wanted && vring.running {
            stop(backend, index, vring)?;
        }
        Ok(())
    }

    /// Stops all rings that run; what they could not complete is logged.
    fn stop_all(&mut self, backend: &mut dyn Backend) {
        for (index, vring) in (0..).zip(&mut self.vrings) {
            if vring.running
                && let Err(refusal) = stop(backend, index, vring)
            {
                tracing::warn!("virtqueue {index}: {refusal}");
            }
        }
    }
}

fn stop(backend: &mut dyn Backend, index: u16, vring: &mut Vring) -> Result<(), Refusal> {
    vring.running = false;
    vring.base = backend.stop_vring(index)?;
    vring.base_at_reset = None;
    Ok(())
}

/// The answer to what was refused: a number that is not 0, or the end of the connection.
fn refused(header: &Header, acknowledge: bool, name: &str, reason: &str) -> Result<Answer, Error> {
    let refused = format!("{name}: {reason}");
    if acknowledge {
        let reply = Some(Reply::number(header.request, 1));
        return Ok(Answer { reply, refused: Some(refused) });
    }
    Err(Error::new(ErrorKind::Refused, refused))
}

#[cfg(test)]
mod tests;
