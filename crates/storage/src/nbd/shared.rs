//! What all rings share about one export: its links, and how new ones are made.
//!
//! Promises: nothing here is touched by a request while its ring keeps its link. One connection at
//! a time is being made, on a thread of its own, with a deadline.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use ringdisk_nbd_protocol::numbers::export_flags;
use ringdisk_ring::Errno;
use ringdisk_tls::ClientTls;

use super::address::NbdAddress;
use super::connect::Timed;
use super::handshake::{Agreed, Refusal, agree};
use super::link::Link;
use super::turns::Turns;
use crate::endpoint::NbdEndpoint;
use crate::opener::Opener;

/// Time for one connection with its handshake.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// Most connections to an export, if it can have several: one for each of so many queue threads.
const LINKS_MAX: usize = 16;
/// After a connection beside others could not be made, none is tried for this time: the server may
/// serve as many clients as it takes already.
const EXTRA_PAUSE: Duration = Duration::from_secs(30);
/// First and longest pause between two attempts while there is no connection.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(1);

/// The connections, and the history of attempts.
#[derive(Debug, Default)]
struct Links {
    open: Vec<Arc<Link>>,
    /// A connection is being made.
    is_opening: bool,
    /// No connection beside others is tried before.
    no_more_before: Option<Instant>,
    /// When the last connection was lost, while there is none.
    down_since: Option<Instant>,
    /// Attempts since then.
    attempts: u32,
    /// No attempt before, while there is no connection.
    retry_at: Option<Instant>,
}

/// What a driver without a link is to do.
#[derive(Debug)]
pub(super) enum Next {
    /// Use this one, which it owns.
    Use(Arc<Link>),
    /// Make a connection: nobody else does.
    Open,
    /// Look again after this time, or when it is woken.
    Wait(Duration),
    /// The time for connecting again is over.
    Fail,
}

/// The state of an export that is shared by all rings.
#[derive(Debug)]
pub(super) struct Shared {
    /// Differs between all exports of the process.
    pub(super) id: u64,
    pub(super) name: String,
    pub(super) address: NbdAddress,
    endpoints: Vec<NbdEndpoint>,
    opener: Option<Arc<dyn Opener>>,
    tls: Option<ClientTls>,
    pub(super) agreed: Agreed,
    /// How long requests wait for a connection.
    reconnect: Duration,
    links: Mutex<Links>,
    pub(super) turns: Turns,
    is_closed: AtomicBool,
    /// Of all drivers, to end them.
    wakers: Mutex<Vec<(u64, Waker)>>,
}

/// A new number, never 0.
pub(super) fn new_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, SeqCst)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Connects and shakes hands. Blocks.
pub(super) fn open_link(
    endpoints: &[NbdEndpoint],
    opener: Option<&Arc<dyn Opener>>,
    address: &NbdAddress,
    tls: Option<&ClientTls>,
    limit: Duration,
) -> Result<(Timed, Agreed), Refusal> {
    let deadline = Instant::now() + limit;
    let mut timed = Timed::connect(endpoints, opener, deadline)?;
    let bitmap = address.dirty_bitmap.as_deref();
    let agreed = agree(&mut timed, &address.export, bitmap, tls)?;
    Ok((timed, agreed))
}

impl Shared {
    /// * `first`: its first connection.
    pub(super) fn new(
        address: NbdAddress,
        endpoints: Vec<NbdEndpoint>,
        opener: Option<Arc<dyn Opener>>,
        tls: Option<ClientTls>,
        reconnect: Duration,
        first: (Timed, Agreed),
    ) -> Shared {
        let (timed, agreed) = first;
        let link = Arc::new(Link::new(timed.socket, timed.tls, agreed.clone(), None));
        Shared {
            id: new_number(),
            name: address.to_string(),
            address,
            endpoints,
            opener,
            tls,
            agreed,
            reconnect,
            links: Mutex::new(Links { open: vec![link], ..Links::default() }),
            turns: Turns::default(),
            is_closed: AtomicBool::new(false),
            wakers: Mutex::default(),
        }
    }

    /// Where its server is.
    pub(super) fn endpoints(&self) -> &[NbdEndpoint] {
        &self.endpoints
    }

    fn links_max(&self) -> usize {
        if self.agreed.has(export_flags::CAN_MULTI_CONN) { LINKS_MAX } else { 1 }
    }

    /// Number of connections now.
    pub(super) fn link_count(&self) -> usize {
        locked(&self.links).open.len()
    }

    /// Decides what a driver without a link does next.
    pub(super) fn next(&self, driver: u64) -> Next {
        let mut links = locked(&self.links);
        if self.turns.may_take(driver)
            && let Some(link) = links.open.iter().find(|link| link.take(driver))
        {
            return Next::Use(Arc::clone(link));
        }
        if links.is_opening {
            return Next::Wait(RETRY_MAX);
        }
        let now = Instant::now();
        if links.open.is_empty() {
            let since = *links.down_since.get_or_insert(now);
            let left =
                links.retry_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
            if left.is_zero() {
                links.is_opening = true;
                return Next::Open;
            }
            // Requests that come after the limit get their answer from the last attempt.
            return if now - since >= self.reconnect { Next::Fail } else { Next::Wait(left) };
        }
        // One that is free belongs to a driver that waits.
        let is_any_free = links.open.iter().any(|link| link.is_free());
        let is_paused = is_any_free || links.no_more_before.is_some_and(|at| now < at);
        if links.open.len() < self.links_max() && !is_paused {
            links.is_opening = true;
            return Next::Open;
        }
        Next::Wait(super::turns::LOOK_INTERVAL)
    }

    /// Makes the connection that [`Shared::next`] asked for, and gives it to the driver. Blocks.
    ///
    /// Returns whether there is one.
    pub(super) fn open(&self, driver: u64) -> Option<Arc<Link>> {
        let (opener, tls) = (self.opener.as_ref(), self.tls.as_ref());
        let opened = open_link(&self.endpoints, opener, &self.address, tls, CONNECT_LIMIT)
            .and_then(|(timed, agreed)| self.check_same(&agreed).map(|()| (timed, agreed)));
        let mut links = locked(&self.links);
        links.is_opening = false;
        let result = match opened {
            Ok((timed, agreed)) if !self.is_closed() => {
                if links.attempts > 0 || links.down_since.is_some() {
                    tracing::warn!("'{}': connected again", self.name);
                }
                (links.down_since, links.retry_at, links.attempts) = (None, None, 0);
                let link = Arc::new(Link::new(timed.socket, timed.tls, agreed, Some(driver)));
                links.open.push(Arc::clone(&link));
                Some(link)
            }
            Ok(_) => None,
            Err(why) if links.open.is_empty() => {
                let since = *links.down_since.get_or_insert_with(Instant::now);
                if links.attempts == 0 {
                    tracing::warn!("'{}': no connection: {why}", self.name);
                }
                links.attempts += 1;
                let pause = RETRY_MIN * 2u32.saturating_pow(links.attempts.min(10));
                links.retry_at = Some(Instant::now() + pause.min(RETRY_MAX));
                if since.elapsed() >= self.reconnect && links.attempts == 1 {
                    tracing::warn!("'{}': requests fail until the server is back", self.name);
                }
                None
            }
            Err(why) => {
                tracing::debug!("'{}': no further connection: {why}", self.name);
                links.no_more_before = Some(Instant::now() + EXTRA_PAUSE);
                None
            }
        };
        drop(links);
        self.turns.offer();
        result
    }

    /// The making of a connection was given up: no thread could be started.
    pub(super) fn opening_failed(&self) {
        let mut links = locked(&self.links);
        links.is_opening = false;
        links.attempts += 1;
        links.retry_at = Some(Instant::now() + RETRY_MAX);
        drop(links);
        self.turns.offer();
    }

    /// A server that comes back must have the same disk.
    fn check_same(&self, agreed: &Agreed) -> Result<(), Refusal> {
        let (first, now) = (&self.agreed, agreed);
        if (first.size, first.flags, first.block) != (now.size, now.flags, now.block) {
            return Err(Refusal::Malformed(
                "the export has another size or other flags than when it was opened",
            ));
        }
        if now.payload_max < first.payload_max
            || now.allocation.is_none() && first.allocation.is_some()
        {
            return Err(Refusal::Malformed("the export can do less than when it was opened"));
        }
        Ok(())
    }

    /// A driver has no request in flight any more.
    pub(super) fn release(&self, link: &Link) {
        link.release();
        self.turns.offer();
    }

    /// A driver lost its link.
    ///
    /// * `why`: for the log.
    pub(super) fn lost(&self, link: &Arc<Link>, why: &dyn std::fmt::Display) {
        link.lose();
        let mut links = locked(&self.links);
        links.open.retain(|it| !Arc::ptr_eq(it, link));
        if links.open.is_empty() {
            links.down_since.get_or_insert_with(Instant::now);
        }
        drop(links);
        if !self.is_closed() {
            tracing::warn!("'{}': the connection is lost: {why}", self.name);
        }
        self.turns.offer();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(SeqCst)
    }

    /// A driver that is to be ended with the export.
    pub(super) fn add_waker(&self, driver: u64, waker: Waker) {
        let mut wakers = locked(&self.wakers);
        wakers.retain(|(it, _)| *it != driver);
        wakers.push((driver, waker));
    }

    pub(super) fn remove_waker(&self, driver: u64) {
        locked(&self.wakers).retain(|(it, _)| *it != driver);
    }

    /// Ends all connections and drivers. Does not wait.
    pub(super) fn close(&self) {
        self.is_closed.store(true, SeqCst);
        for link in std::mem::take(&mut locked(&self.links).open) {
            link.close();
        }
        for (_, waker) in std::mem::take(&mut *locked(&self.wakers)) {
            waker.wake();
        }
    }

    /// The error of requests that cannot be carried out.
    pub(super) const FAILED: Errno = Errno::IO;
}
