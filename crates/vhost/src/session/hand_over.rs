//! A session that goes on in another process: the front end notices nothing but a pause.
//!
//! Order: the old process calls [`Session::suspend`], sends [`Session::state`] with the socket and
//! what the back end has (memory, log, area of requests in flight, call and error eventfds,
//! channel); the new one gives those to its own back end, then [`Session::restore`] and
//! [`Session::resume`]. If that fails, the old one resumes.
//!
//! Promises: control thread; until the new process has resumed the session, nothing is lost to the
//! old one.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::backend::Backend;
use super::regions::Regions;
use super::vring::Vring;
use super::{Fault, Session, SessionConfig};
use crate::protocol::{Region, VringAddress, features};
use crate::{Error, ErrorKind};

/// One virtqueue, as the front end left it.
#[derive(Debug)]
pub struct SavedVring {
    /// Entries, if they were said.
    pub size: Option<u16>,
    /// Where it is, if that was said.
    pub address: Option<VringAddress>,
    /// Where to begin.
    pub base: u32,
    /// Where it stood when a reset stopped it, if GET_VRING_BASE may still ask for that.
    pub base_at_reset: Option<u32>,
    /// What SET_VRING_ENABLE said, if it came.
    pub enabled: Option<bool>,
    /// The eventfd that the driver kicks, if it was started.
    pub kick: Option<OwnedFd>,
    /// Whether it runs. In a session that is restored: whether it is to run again, if the front end
    /// wants it to.
    pub resumes: bool,
}

/// All that a session knows.
#[derive(Debug)]
pub struct SessionState {
    /// Virtio features that were negotiated.
    pub features: u64,
    /// Protocol features that were negotiated.
    pub protocol_features: u64,
    /// Device status.
    pub status: u8,
    /// Guest address, size and front end's address of each region.
    pub regions: Vec<(u64, u64, u64)>,
    /// All virtqueues, in order.
    pub vrings: Vec<SavedVring>,
}

impl Session {
    /// Stops all rings; nothing else changes. No message may be handled until [`Session::resume`].
    pub fn suspend(&mut self, backend: &mut dyn Backend) {
        self.stop_all(backend);
    }

    /// What is known, without the descriptors ([`Session::kicks`]).
    #[must_use]
    pub fn state(&self) -> SessionState {
        let saved = |vring: &Vring| {
            let Vring { size, address, base, base_at_reset, enabled, running, .. } = *vring;
            let kick = None;
            SavedVring { size, address, base, base_at_reset, enabled, kick, resumes: running }
        };
        SessionState {
            features: self.features,
            protocol_features: self.protocol_features,
            status: self.status,
            regions: self.regions.saved(),
            vrings: self.vrings.iter().map(saved).collect(),
        }
    }

    /// The kick eventfds, each with the number of its virtqueue.
    pub fn kicks(&self) -> impl Iterator<Item = (u16, BorrowedFd<'_>)> {
        let all = (0..).zip(&self.vrings);
        all.filter_map(|(index, vring)| Some((index, vring.kick.as_ref()?.as_fd())))
    }

    /// The session of another process. No ring runs yet.
    ///
    /// * `config`: what this process offers; at least what was negotiated.
    ///
    /// Errors: something that was negotiated is not offered any more, or the state cannot be.
    pub fn restore(config: SessionConfig, state: SessionState) -> Result<Session, Error> {
        let refused = |what: String| Error::new(ErrorKind::Refused, format!("taking over: {what}"));
        let mut session = Session::new(config);
        let config = session.config;
        let lost = state.features & !config.features;
        let lost_protocol = state.protocol_features & !config.protocol_features;
        if lost != 0 || lost_protocol != 0 {
            let what = format!("features {lost:#x}, protocol features {lost_protocol:#x}");
            return Err(refused(format!("{what} are not offered any more")));
        }
        if state.vrings.len() > session.vrings.len()
            || state.regions.len() > config.mem_slots_max.into()
        {
            return Err(refused("more virtqueues or regions than are possible".to_owned()));
        }
        let regions: Vec<Region> = state
            .regions
            .iter()
            .map(|&(guest_addr, size, user_addr)| Region {
                guest_addr,
                size,
                user_addr,
                mmap_offset: 0,
            })
            .collect();
        let regions: Vec<&Region> = regions.iter().collect();
        session.regions = Regions::of(&regions).map_err(refused)?;
        for (vring, saved) in session.vrings.iter_mut().zip(state.vrings) {
            let SavedVring { size, address, base, base_at_reset, enabled, kick, resumes } = saved;
            if size.is_some_and(|size| size == 0 || size > config.queue_size_max) {
                return Err(refused(format!("a virtqueue of {size:?} entries")));
            }
            if let Some(address) = &address {
                super::vring::check(address).map_err(refused)?;
            }
            let running = false;
            *vring = Vring {
                size,
                address,
                base,
                base_at_reset,
                kick,
                enabled,
                running,
                rests: !resumes,
            };
        }
        session.features = state.features;
        session.protocol_features = state.protocol_features;
        session.status = state.status;
        // Who was served long enough for that is no stranger.
        session.claimed = true;
        Ok(session)
    }

    /// Tells the back end what was negotiated, and starts the rings that are to run. Those that
    /// waited for their memory wait again.
    ///
    /// Errors: one of them cannot; those before it run.
    pub fn resume(&mut self, backend: &mut dyn Backend) -> Result<(), Error> {
        let failed = |fault: Fault| {
            let reason = match fault {
                Fault::Refused(reason) => reason,
                Fault::Malformed(malformed) => malformed.to_string(),
            };
            Error::new(ErrorKind::Refused, format!("going on: {reason}"))
        };
        backend.set_features(self.features).map_err(|refusal| failed(refusal.into()))?;
        if self.status != 0 {
            backend.set_status(self.status & !features::STATUS_NEEDS_RESET);
        }
        for index in 0..self.config.queues_max {
            self.go_on(backend, index).map_err(failed)?;
        }
        Ok(())
    }

    fn go_on(&mut self, backend: &mut dyn Backend, index: u16) -> Result<(), Fault> {
        let at_once = self.features & features::F_PROTOCOL_FEATURES == 0;
        let packed = self.packed();
        let (_, vring) = self.vring(u32::from(index))?;
        if vring.wanted(at_once) && !vring.running && !vring.rests {
            let setup = vring.setup(packed).map_err(|what| format!("virtqueue {index}: {what}"))?;
            backend.resume_vring(index, setup)?;
            vring.running = true;
        }
        Ok(())
    }
}
