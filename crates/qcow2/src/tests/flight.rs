use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use rustix::io::Errno;

use crate::concurrent::loads_in_flight::{Flights, Join, Leader};

fn lead(flights: &Flights<u32, u32>) -> Leader<'_, u32, u32> {
    match flights.join(1, || None) {
        Join::Lead(leader) => leader,
        _ => panic!("somebody leads already"),
    }
}

/// Polls a follower of load 1, then ends the load, then polls again.
fn follow(flights: &Flights<u32, u32>, end: impl FnOnce()) -> Option<Result<u32, Errno>> {
    let Join::Follow(follower) = flights.join(1, || None) else { panic!("nobody leads") };
    let mut follower = pin!(follower);
    let mut context = Context::from_waker(Waker::noop());
    assert!(follower.as_mut().poll(&mut context).is_pending());
    assert!(follower.as_mut().poll(&mut context).is_pending());
    end();
    match follower.poll(&mut context) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("not woken"),
    }
}

#[test]
fn followers_get_the_value_of_the_leader() {
    let flights = Flights::new();
    let leader = lead(&flights);
    assert_eq!(follow(&flights, || leader.finish(Ok(5))), Some(Ok(5)));
    assert_eq!(flights.len(), 0);
}

#[test]
fn followers_get_the_error_of_the_leader() {
    let flights = Flights::new();
    let leader = lead(&flights);
    assert_eq!(follow(&flights, || leader.finish(Err(Errno::IO))), Some(Err(Errno::IO)));
}

#[test]
fn followers_of_a_dropped_leader_try_again() {
    let flights = Flights::new();
    let leader = lead(&flights);
    assert_eq!(follow(&flights, || drop(leader)), None);
    assert_eq!(flights.len(), 0);
}

#[test]
fn what_is_ready_is_not_loaded() {
    let flights: Flights<u32, u32> = Flights::new();
    assert!(matches!(flights.join(1, || Some(3)), Join::Ready(3)));
}

#[test]
fn other_keys_have_their_own_leader() {
    let flights = Flights::new();
    let _first = lead(&flights);
    assert!(matches!(flights.join(2, || None), Join::Lead(_)));
}
