//! A simulation of loads: what the rule chooses, and how long it takes.

use super::{Load, Policy, Spot, WINDOW_NS};

/// What a client gets done in each spot, requests per window, and requests for each turn of the loop at home.
struct Client {
    home: u64,
    away: u64,
    split: u64,
    per_turn: (u64, u64),
    bytes: u64,
}

const SYNC: Client = Client { home: 200, away: 60, split: 100, per_turn: (1, 1), bytes: 4096 };
const DEEP: Client = Client { home: 300, away: 620, split: 500, per_turn: (4, 1), bytes: 4096 };
const LARGE: Client = Client { home: 3, away: 3, split: 6, per_turn: (3, 1), bytes: 1 << 20 };
const MANY: Client = Client { home: 500, away: 510, split: 490, per_turn: (3, 2), bytes: 4096 };

struct Sim {
    policy: Policy,
    load: Load,
}

impl Sim {
    fn new() -> Sim {
        Sim { policy: Policy::new(true), load: Load { now: 1, ..Load::default() } }
    }

    /// Runs for some windows; how many of them were spent in each spot.
    fn run(&mut self, client: &Client, windows: usize) -> [usize; 3] {
        let mut spent = [0; 3];
        for _ in 0..windows {
            let spot = self.policy.spot();
            spent[spot as usize] += 1;
            let done = match spot {
                Spot::Home => client.home,
                Spot::Away => client.away,
                Spot::Split => client.split,
            };
            self.load.now += WINDOW_NS;
            self.load.requests += done;
            self.load.own += done;
            self.load.bytes += done * client.bytes;
            self.load.turns += done * client.per_turn.1 / client.per_turn.0;
            self.policy.step(&self.load);
        }
        spent
    }
}

#[test]
fn a_client_that_waits_is_served_at_home() {
    let mut sim = Sim::new();
    assert_eq!(sim.run(&SYNC, 500), [500, 0, 0]);
}

#[test]
fn a_deep_client_is_served_away_after_a_few_windows() {
    let mut sim = Sim::new();
    let spent = sim.run(&DEEP, 500);
    assert!(spent[Spot::Away as usize] > 460, "{spent:?}");
    let mut sim = Sim::new();
    sim.run(&DEEP, 5);
    assert_eq!(sim.policy.spot(), Spot::Away);
}

#[test]
fn large_requests_are_split() {
    let mut sim = Sim::new();
    let spent = sim.run(&LARGE, 500);
    assert!(spent[Spot::Split as usize] > 430, "{spent:?}");
}

#[test]
fn trials_that_gain_nothing_get_rare() {
    let mut sim = Sim::new();
    sim.run(&MANY, 300);
    let spent = sim.run(&MANY, 1000);
    assert!(spent[Spot::Home as usize] > 950, "{spent:?}");
}

#[test]
fn a_change_of_the_load_is_followed_within_30_ms() {
    let mut sim = Sim::new();
    for _ in 0..5 {
        sim.run(&DEEP, 300);
        assert_eq!(sim.policy.spot(), Spot::Away);
        let windows = 30_000_000 / WINDOW_NS;
        sim.run(&SYNC, usize::try_from(windows).expect("small"));
        assert_eq!(sim.policy.spot(), Spot::Home);
        sim.run(&SYNC, 300);
        sim.run(&DEEP, usize::try_from(windows).expect("small"));
        assert_eq!(sim.policy.spot(), Spot::Away);
    }
}

#[test]
fn what_home_was_once_is_forgotten() {
    let mut sim = Sim::new();
    sim.run(&DEEP, 100);
    // As deep, but slower everywhere, and better away all the same.
    let slower = Client { home: 150, away: 200, ..DEEP };
    sim.run(&slower, 100);
    let spent = sim.run(&slower, 500);
    assert!(spent[Spot::Away as usize] > 440, "{spent:?}");
}

#[test]
fn a_slow_client_is_served_at_home_again() {
    let mut sim = Sim::new();
    sim.run(&DEEP, 100);
    assert_eq!(sim.policy.spot(), Spot::Away);
    let slow = Client { home: 1, away: 1, split: 1, per_turn: (1, 1), bytes: 4096 };
    for _ in 0..50 {
        // A request every 30 ms.
        sim.load.now += 15 * WINDOW_NS;
        sim.run(&slow, 1);
    }
    assert_eq!(sim.policy.spot(), Spot::Home);
}

#[test]
fn one_thread_moves_nothing() {
    let mut sim = Sim { policy: Policy::new(false), ..Sim::new() };
    assert_eq!(sim.run(&DEEP, 100), [100, 0, 0]);
}
