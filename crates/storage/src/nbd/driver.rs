//! The requests of one ring to one export, and the task that carries them.
//!
//! Promises: requests of a ring are sent and answered on that ring, in batches; a request wakes the
//! task and waits, nothing else. The task owns a link only while requests are in flight, so that a
//! ring whose thread stands still keeps none. It ends with its ring or with the export.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ringdisk_nbd_protocol::request::Request;
use ringdisk_nbd_protocol::status::Extent;
use ringdisk_ring::{Errno, IoBuf, Ring};

use super::buffers::{Input, Output};
use super::link::Link;
use super::lost::Lost;
use super::opening;
use super::shared::{Next, Shared, new_number};
use super::slots::Slots;

/// One ring's side of an export.
pub(super) struct Driver {
    pub(super) number: u64,
    pub(super) ring: Ring,
    pub(super) shared: Arc<Shared>,
    pub(super) slots: RefCell<Slots>,
    pub(super) input: Input,
    pub(super) output: RefCell<Output>,
    /// Wakes the task.
    waker: RefCell<Option<Waker>>,
    /// Nothing was sent since the link was taken.
    pub(super) is_first_batch: Cell<bool>,
    /// The task is woken already.
    is_woken: Cell<bool>,
    /// A send is in flight.
    pub(super) is_sending: Cell<bool>,
    /// The request into whose memory the kernel writes at this moment.
    pub(super) direct: Cell<Option<u16>>,
    /// That request was given up.
    pub(super) is_abandoned: Cell<bool>,
}

thread_local! {
    /// The drivers of this thread: of few exports, and nearly always of one ring.
    static DRIVERS: RefCell<Vec<Rc<Driver>>> = const { RefCell::new(Vec::new()) };
}

/// The driver of a ring; made when there is none. Allocates then only.
pub(super) fn of(shared: &Arc<Shared>, ring: &Ring) -> Rc<Driver> {
    let is_it = |driver: &&Rc<Driver>| driver.shared.id == shared.id && driver.ring.is(ring);
    let found = DRIVERS.with_borrow(|all| all.iter().find(is_it).cloned());
    found.unwrap_or_else(|| start(shared, ring))
}

#[cold]
fn start(shared: &Arc<Shared>, ring: &Ring) -> Rc<Driver> {
    let driver = Rc::new(Driver {
        number: new_number(),
        ring: ring.clone(),
        shared: Arc::clone(shared),
        slots: Slots::new().into(),
        input: Input::new(),
        output: Output::new().into(),
        waker: RefCell::default(),
        is_first_batch: Cell::default(),
        is_woken: Cell::new(false),
        is_sending: Cell::new(false),
        direct: Cell::new(None),
        is_abandoned: Cell::new(false),
    });
    DRIVERS.with_borrow_mut(|all| all.push(Rc::clone(&driver)));
    let running = Running(Rc::clone(&driver));
    ring.spawn(async move { running.0.run().await });
    driver
}

/// The task of a driver; its end, however it comes, is the end of the driver.
struct Running(Rc<Driver>);

impl Drop for Running {
    fn drop(&mut self) {
        let driver = &self.0;
        driver.shared.remove_waker(driver.number);
        driver.shared.turns.leave(driver.number);
        // At the end of the thread the table may be gone.
        let _ = DRIVERS.try_with(|all| {
            let taken = {
                let mut all = all.borrow_mut();
                let place = all.iter().position(|it| Rc::ptr_eq(it, driver));
                place.map(|place| all.swap_remove(place))
            };
            drop(taken);
        });
    }
}

/// A link that this driver owns. Dropped with requests in flight (the ring ends), it is lost.
struct Owned<'a> {
    driver: &'a Driver,
    link: Arc<Link>,
    is_over: bool,
}

impl Owned<'_> {
    /// No request is in flight.
    fn release(mut self) -> Arc<Link> {
        self.is_over = true;
        self.driver.shared.release(&self.link);
        Arc::clone(&self.link)
    }

    fn lose(mut self, why: Lost) {
        self.is_over = true;
        self.driver.shared.lost(&self.link, &why);
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.driver.shared.lost(&self.link, &"its thread ended with requests in flight");
        }
    }
}

/// A request in its slot.
struct InFlight<'a> {
    driver: &'a Driver,
    index: u16,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        if self.driver.direct.get() == Some(self.index) {
            self.driver.is_abandoned.set(true);
            self.driver.wake();
        }
        self.driver.slots.borrow_mut().end(self.index);
    }
}

impl Driver {
    /// Carries a request out.
    ///
    /// * `buf`: of a read and a write, as long as the request.
    ///
    /// Errors: the server's; `EIO` without a connection.
    pub(super) async fn request(&self, request: Request, buf: Option<&IoBuf>) -> Result<(), Errno> {
        let in_flight = self.begin(request, buf).await;
        poll_fn(|cx| self.slots.borrow_mut().poll(in_flight.index, cx.waker())).await
    }

    /// Asks for block status.
    ///
    /// * `take`: gets the extents: not empty, each with a length.
    ///
    /// Errors: as [`Driver::request`].
    pub(super) async fn status<T>(
        &self,
        request: Request,
        take: impl FnOnce(&[Extent]) -> T,
    ) -> Result<T, Errno> {
        let in_flight = self.begin(request, None).await;
        poll_fn(|cx| self.slots.borrow_mut().poll(in_flight.index, cx.waker())).await?;
        Ok(take(self.slots.borrow_mut().extents(in_flight.index)))
    }

    async fn begin(&self, request: Request, buf: Option<&IoBuf>) -> InFlight<'_> {
        let begun = poll_fn(|cx| self.slots.borrow_mut().begin(request, buf, cx.waker())).await;
        self.wake();
        InFlight { driver: self, index: begun }
    }

    /// Lets the task look at the requests.
    fn wake(&self) {
        if !self.is_woken.replace(true)
            && let Some(waker) = &*self.waker.borrow()
        {
            waker.wake_by_ref();
        }
    }

    /// The task.
    async fn run(&self) {
        poll_fn(|cx| {
            *self.waker.borrow_mut() = Some(cx.waker().clone());
            self.shared.add_waker(self.number, cx.waker().clone());
            Poll::Ready(())
        })
        .await;
        let mut last: Option<Arc<Link>> = None;
        loop {
            poll_fn(|_| {
                self.is_woken.set(false);
                let is_due = self.slots.borrow().has_queued() || self.shared.is_closed();
                if is_due { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            if self.shared.is_closed() {
                return;
            }
            let Some(link) = self.acquire(last.take()).await else {
                self.slots.borrow_mut().fail_queued(Shared::FAILED);
                continue;
            };
            let owned = Owned { driver: self, link, is_over: false };
            match self.serve(&owned.link).await {
                Ok(()) => last = Some(owned.release()),
                Err(lost) => {
                    self.slots.borrow_mut().lost(lost.repeats_changes(), Shared::FAILED);
                    self.input.clear();
                    self.is_sending.set(false);
                    self.direct.set(None);
                    self.is_abandoned.set(false);
                    owned.lose(lost);
                }
            }
        }
    }

    /// A link that is this driver's now. `None`: there is no connection, and requests fail.
    ///
    /// * `last`: the one that it had before.
    async fn acquire(&self, last: Option<Arc<Link>>) -> Option<Arc<Link>> {
        if let Some(link) = last
            && !self.shared.turns.is_anyone_waiting()
            && link.take(self.number)
        {
            if !link.is_lost() {
                return Some(link);
            }
            link.release();
        }
        let _turn = Turn(self);
        let mut is_queued = false;
        loop {
            if self.shared.is_closed() {
                return None;
            }
            match self.shared.next(self.number) {
                Next::Use(link) => return Some(link),
                Next::Fail => return None,
                Next::Open => {
                    // On failure the next look says what to do.
                    let opened = opening::run(Arc::clone(&self.shared), self.number).await;
                    if opened.is_some() {
                        return opened;
                    }
                }
                // What is offered after this driver has entered the queue wakes it; so it looks
                // once more before it waits.
                Next::Wait(_) if !is_queued => {
                    poll_fn(|cx| {
                        self.shared.turns.enter(self.number, cx.waker());
                        Poll::Ready(())
                    })
                    .await;
                    is_queued = true;
                }
                Next::Wait(limit) => {
                    let mut is_first = true;
                    let woken = poll_fn(|_| {
                        if std::mem::take(&mut is_first) { Poll::Pending } else { Poll::Ready(()) }
                    });
                    let _ = self.ring.within(limit, woken).await;
                }
            }
        }
    }

    /// Sends requests and takes their replies until none is in flight.
    ///
    /// Errors: the link is lost.
    async fn serve(&self, link: &Link) -> Result<(), Lost> {
        self.is_first_batch.set(true);
        let mut sending = pin!(self.send_all(link));
        let mut receiving = pin!(self.receive_all(link));
        poll_fn(|cx: &mut Context<'_>| {
            self.is_woken.set(false);
            if self.shared.is_closed() {
                return Poll::Ready(Err(Lost::Ended));
            }
            if self.is_abandoned.get() {
                return Poll::Ready(Err(Lost::Abandoned));
            }
            if let Poll::Ready(lost) = sending.as_mut().poll(cx) {
                return Poll::Ready(Err(lost));
            }
            receiving.as_mut().poll(cx)
        })
        .await
    }

    /// Whether requests that are queued may be sent: not while other rings wait for the link, but
    /// for the first batch of a turn. Else no ring would send anything while several wait.
    pub(super) fn may_send(&self) -> bool {
        self.is_first_batch.get() || !self.shared.turns.is_anyone_waiting()
    }
}

/// The place of a driver in the queue for links.
struct Turn<'a>(&'a Driver);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.shared.turns.leave(self.0.number);
    }
}
