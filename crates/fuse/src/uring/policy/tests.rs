//! A simulation of loads: what the rule chooses, and how long it takes.

use ringdisk_testkit::sim::Prng;

use super::{Load, Policy, Spot, Stay, Step, WINDOW_NS};

/// What a client gets done in each spot, requests per window, and requests for each turn of the
/// loop. Figures of this project's own measurements on two CPUs.
struct Client {
    home: u64,
    free: u64,
    split: u64,
    per_turn: (u64, u64),
    bytes: u64,
    /// In flight on the average, where requests wait for storage; 0: they do not.
    in_flight: u64,
}

const SYNC: Client =
    Client { home: 200, free: 70, split: 50, per_turn: (1, 1), bytes: 4096, in_flight: 0 };
const DEEP: Client = Client { home: 300, free: 620, split: 330, per_turn: (4, 1), ..SYNC };
const DEPTH_4: Client = Client { home: 230, free: 290, split: 240, per_turn: (5, 4), ..SYNC };
const DEPTH_2: Client = Client { home: 180, free: 72, split: 170, per_turn: (5, 4), ..SYNC };
const LARGE: Client =
    Client { home: 7, free: 7, split: 12, per_turn: (3, 1), bytes: 1 << 20, in_flight: 0 };
const MANY: Client = Client { home: 500, free: 510, split: 490, per_turn: (3, 2), ..SYNC };
const MANY_LARGE: Client = Client { home: 100, free: 40, split: 70, bytes: 128 << 10, ..LARGE };
/// On a file: each turn of a thread that polls sees one request or one completion.
const FILE_SYNC: Client =
    Client { home: 24, free: 20, split: 18, per_turn: (1, 2), in_flight: 1, ..FILE_DEEP };
const FILE_DEEP: Client =
    Client { home: 72, free: 80, split: 108, per_turn: (1, 1), bytes: 4096, in_flight: 14 };

struct Sim {
    policy: Policy,
    load: Load,
    /// Windows vary by up to so many percent.
    noise: u64,
    random: Prng,
    done: u64,
}

impl Sim {
    fn new() -> Sim {
        Sim::noisy(0)
    }

    fn noisy(noise: u64) -> Sim {
        let load = Load { now: 1, ..Load::default() };
        let policy = Policy::new(true, None);
        Sim { policy, load, noise, random: Prng::new(noise + 1), done: 0 }
    }

    /// Rate over some windows, as a share of the best spot's, in percent.
    fn share(&mut self, client: &Client, windows: usize) -> u64 {
        let before = self.done;
        self.run(client, windows);
        let best = client.home.max(client.free).max(client.split);
        (self.done - before) * 100 / (best * windows as u64)
    }

    /// Runs for some windows; how many of them were spent in each spot.
    fn run(&mut self, client: &Client, windows: usize) -> [usize; 4] {
        let mut spent = [0; 4];
        for _ in 0..windows {
            let spot = self.policy.spot();
            spent[spot as usize] += 1;
            let mean = match spot {
                Spot::Home => client.home,
                Spot::Free => client.free,
                Spot::Split => client.split,
                Spot::Away => unreachable!("the rule never chooses it"),
            };
            let noise = mean * self.noise / 100;
            let done = mean - noise + self.random.below(2 * noise + 1);
            self.done += done;
            self.load.now += WINDOW_NS;
            self.load.requests += done;
            self.load.own += done;
            self.load.own_ns += client.in_flight * WINDOW_NS;
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
    assert_eq!(sim.run(&SYNC, 500), [500, 0, 0, 0]);
}

#[test]
fn a_deep_client_is_served_where_there_is_room_after_a_few_windows() {
    let mut sim = Sim::new();
    sim.run(&DEEP, 5);
    assert_eq!(sim.policy.spot(), Spot::Free);
    let spent = sim.run(&DEEP, 500);
    assert!(spent[Spot::Free as usize] > 480, "{spent:?}");
}

#[test]
fn large_requests_are_split() {
    let mut sim = Sim::new();
    let spent = sim.run(&LARGE, 500);
    assert!(spent[Spot::Split as usize] > 430, "{spent:?}");
}

#[test]
fn requests_that_wait_for_storage_are_split_when_there_are_several() {
    let mut sim = Sim::new();
    let spent = sim.run(&FILE_DEEP, 500);
    assert!(spent[Spot::Split as usize] > 430, "{spent:?}");
    let mut sim = Sim::new();
    assert_eq!(sim.run(&FILE_SYNC, 500), [500, 0, 0, 0]);
}

#[test]
fn a_load_that_begins_to_wait_for_storage_is_split_from_wherever_it_was() {
    let mut sim = Sim::new();
    sim.run(&DEEP, 100);
    assert_eq!(sim.policy.spot(), Spot::Free);
    sim.run(&FILE_DEEP, 200);
    let spent = sim.run(&FILE_DEEP, 500);
    assert!(spent[Spot::Split as usize] > 430, "{spent:?}");
}

#[test]
fn where_two_threads_lose_for_storage_they_are_at_home() {
    let client = Client { split: 60, ..FILE_DEEP };
    let mut sim = Sim::new();
    sim.run(&client, 60);
    let spent = sim.run(&client, 1000);
    assert!(spent[Spot::Home as usize] > 900, "{spent:?}");
}

#[test]
fn a_disk_whose_rate_varies_is_served_by_two_threads_most_of_the_time() {
    let mut sim = Sim::noisy(40);
    sim.run(&FILE_DEEP, 100);
    let spent = sim.run(&FILE_DEEP, 2000);
    assert!(spent[Spot::Split as usize] > 1800, "{spent:?}");
}

#[test]
fn a_busy_client_of_a_slow_disk_has_not_stopped() {
    // 500 requests of 1 MiB a second, and twice as many from two threads.
    let slow = Client { home: 1, free: 1, split: 2, ..LARGE };
    let mut sim = Sim::new();
    sim.run(&slow, 200);
    let spent = sim.run(&slow, 1000);
    assert!(spent[Spot::Split as usize] > 800, "{spent:?}");
}

#[test]
fn every_client_gets_nearly_what_the_best_spot_gives_in_noise() {
    let clients = [
        ("sync", &SYNC),
        ("deep", &DEEP),
        ("depth 4", &DEPTH_4),
        ("depth 2", &DEPTH_2),
        ("many", &MANY),
        ("many large", &MANY_LARGE),
        ("sync on a file", &FILE_SYNC),
        ("deep on a file", &FILE_DEEP),
    ];
    for noise in [0, 5, 15] {
        for (name, client) in clients {
            let mut sim = Sim::noisy(noise);
            sim.run(client, 50);
            let share = sim.share(client, 2000);
            assert!(share >= 95, "{name} with {noise} %: {share} %");
        }
    }
}

#[test]
fn trials_that_gain_nothing_get_rare() {
    let mut sim = Sim::new();
    sim.run(&MANY_LARGE, 300);
    let spent = sim.run(&MANY_LARGE, 1000);
    assert!(spent[Spot::Home as usize] > 980, "{spent:?}");
}

#[test]
fn a_change_of_the_load_is_followed_within_30_ms() {
    for noise in [0, 10] {
        let mut sim = Sim::noisy(noise);
        let windows = usize::try_from(30_000_000 / WINDOW_NS).expect("small");
        for _ in 0..5 {
            sim.run(&DEEP, 300);
            sim.run(&SYNC, windows);
            assert_eq!(sim.policy.spot(), Spot::Home);
            sim.run(&SYNC, 300);
            sim.run(&DEEP, windows);
            assert_eq!(sim.policy.spot(), Spot::Free);
        }
    }
}

#[test]
fn what_a_spot_gave_once_is_forgotten() {
    let mut sim = Sim::new();
    sim.run(&DEEP, 100);
    // As deep, but slower everywhere, and better free all the same.
    let slower = Client { home: 150, free: 200, ..DEEP };
    sim.run(&slower, 100);
    let spent = sim.run(&slower, 500);
    assert!(spent[Spot::Free as usize] > 460, "{spent:?}");
}

#[test]
fn a_slow_client_is_served_at_home_again() {
    let mut sim = Sim::new();
    sim.run(&DEEP, 100);
    assert_eq!(sim.policy.spot(), Spot::Free);
    let slow = Client { home: 1, free: 1, split: 1, ..SYNC };
    for _ in 0..50 {
        // A request every 30 ms.
        sim.load.now += 15 * WINDOW_NS;
        sim.run(&slow, 1);
    }
    assert_eq!(sim.policy.spot(), Spot::Home);
}

#[test]
fn a_thread_begins_where_another_one_ended() {
    let mut sim = Sim::new();
    sim.run(&SYNC, 10);
    sim.load.now += 100 * WINDOW_NS;
    sim.load.begin = Spot::Free;
    assert_eq!(sim.policy.step(&sim.load), Step::Moved);
    // The same client, on another CPU.
    let spent = sim.run(&DEEP, 30);
    assert_eq!(spent, [0, 30, 0, 0]);
}

#[test]
fn a_guess_is_given_up_for_a_client_that_waits() {
    let mut sim = Sim::new();
    sim.run(&SYNC, 10);
    sim.load.now += 100 * WINDOW_NS;
    sim.load.begin = Spot::Free;
    sim.policy.step(&sim.load);
    let spent = sim.run(&SYNC, 100);
    assert!(spent[Spot::Free as usize] <= 2, "{spent:?}");
}

#[test]
fn one_trial_at_a_time() {
    let mut sim = Sim::new();
    sim.load.must_wait = true;
    assert_eq!(sim.run(&DEEP, 100), [100, 0, 0, 0]);
    sim.load.must_wait = false;
    let spent = sim.run(&DEEP, 100);
    assert!(spent[Spot::Free as usize] > 90, "{spent:?}");
}

#[test]
fn one_thread_moves_nothing() {
    let mut sim = Sim { policy: Policy::new(false, None), ..Sim::new() };
    assert_eq!(sim.run(&DEEP, 100), [100, 0, 0, 0]);
}

#[test]
fn a_spot_to_compare_is_not_left() {
    let policy = Policy::new(true, Some(Stay::Split.spot()));
    let mut sim = Sim { policy, ..Sim::new() };
    assert_eq!(sim.run(&SYNC, 100), [0, 0, 100, 0]);
}
