//! The mutex for tasks, polled by hand.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use crate::task_mutex::TaskMutex;

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn the_second_waits_until_the_first_is_done() {
    let mutex = TaskMutex::default();
    let count = Arc::new(Count::default());
    let waker = Waker::from(Arc::clone(&count));
    let mut context = Context::from_waker(&waker);
    let mut first = pin!(mutex.lock());
    let mut second = pin!(mutex.lock());
    let Poll::Ready(pass) = first.as_mut().poll(&mut context) else {
        panic!("the mutex is free");
    };
    assert!(second.as_mut().poll(&mut context).is_pending());
    drop(pass);
    assert_eq!(count.0.load(Ordering::Relaxed), 1);
    assert!(second.as_mut().poll(&mut context).is_ready());
}

#[test]
fn a_waiter_that_is_dropped_does_not_keep_others_out() {
    for is_earlier in [true, false] {
        let mutex = TaskMutex::default();
        // Each its own: who is woken is the question.
        let counts = [Arc::new(Count::default()), Arc::new(Count::default())];
        let wakers = counts.each_ref().map(|count| Waker::from(Arc::clone(count)));
        let mut contexts = wakers.each_ref().map(Context::from_waker);
        let mut first = Box::pin(mutex.lock());
        let pass = first.as_mut().poll(&mut contexts[0]);
        assert!(pass.is_ready());
        let mut waiters = [Box::pin(mutex.lock()), Box::pin(mutex.lock())];
        for (waiter, context) in waiters.iter_mut().zip(&mut contexts) {
            assert!(waiter.as_mut().poll(context).is_pending());
        }
        let [one, other] = waiters;
        let (dropped, mut left, number) =
            if is_earlier { (one, other, 1) } else { (other, one, 0) };
        drop(dropped);
        drop(pass);
        assert_eq!(
            counts[number].0.load(Ordering::Relaxed),
            1,
            "nobody wakes the one that is left"
        );
        assert!(left.as_mut().poll(&mut contexts[number]).is_ready());
    }
}

#[test]
fn tasks_get_it_in_the_order_in_which_they_came() {
    let mutex = TaskMutex::default();
    let mut context = Context::from_waker(Waker::noop());
    let mut pass = match pin!(mutex.lock()).poll(&mut context) {
        Poll::Ready(pass) => Some(pass),
        Poll::Pending => panic!("the mutex is free"),
    };
    let mut waiting = [Box::pin(mutex.lock()), Box::pin(mutex.lock())];
    for waiter in &mut waiting {
        assert!(waiter.as_mut().poll(&mut context).is_pending());
    }
    drop(pass.take());
    // The one that had it comes again, before the others have looked.
    let mut again = Box::pin(mutex.lock());
    assert!(again.as_mut().poll(&mut context).is_pending());
    let [mut first, mut second] = waiting;
    assert!(second.as_mut().poll(&mut context).is_pending());
    let Poll::Ready(pass) = first.as_mut().poll(&mut context) else { panic!("its turn") };
    drop(pass);
    let Poll::Ready(pass) = second.as_mut().poll(&mut context) else { panic!("its turn") };
    drop(pass);
    assert!(again.as_mut().poll(&mut context).is_ready());
}
