//! What `--help` and `--version` print.
//!
//! Promises: programs that look into these texts find what they look for: the names of all options
//! (virt-v2v looks for `--selinux-label`), and on the first line of the version the name and the
//! number of the `qemu-nbd` whose options these are.

use crate::VERSION;

/// The help.
///
/// * `program`: the name under which the program was started.
#[must_use]
pub fn help(program: &str) -> String {
    format!("Usage: {program} [OPTIONS] FILE\n  or:  {program} -L [OPTIONS]\n{OPTIONS}")
}

/// The version.
///
/// * `program`: the name under which the program was started.
/// * `ringdisk`: our own version.
#[must_use]
pub fn version(program: &str, ringdisk: &str) -> String {
    format!("{program} {VERSION} (ringdisk {ringdisk})\n")
}

const OPTIONS: &str = "\
Serve a disk image over NBD with the options of qemu-nbd (ringdisk).

  -h, --help                print this and end
  -V, --version             print the version and end

Where and to whom:
  -p, --port=PORT           listen on this port of TCP (10809)
  -b, --bind=ADDRESS        listen on this address (0.0.0.0: all of the host)
  -k, --socket=PATH         listen on this Unix socket instead
  -e, --shared=NUM          serve NUM clients at once (1); 0: any number
  -t, --persistent          stay when the last client has gone
  -v, --verbose             with --fork, go on writing messages to the standard error output
  -x, --export-name=NAME    name of the export (empty)
  -D, --description=TEXT    description of the export, for people
      --handshake-limit=S   end a connection whose handshake takes longer than S seconds (10; 0: no
                            limit)

What of the image:
  -o, --offset=OFFSET       leave out this many bytes at the beginning
  -A, --allocation-depth    offer the metadata context qemu:allocation-depth
  -B, --bitmap=NAME         offer this dirty bitmap; may be repeated

General:
  -L, --list                print what a server exports
      --object TYPE,id=ID,… define an object: tls-creds-x509, authz-simple, authz-list
      --tls-creds=ID        TLS with this object; other connections are refused
      --tls-authz=ID        who may connect
      --tls-hostname=NAME   with -L: name in the certificate of the server
      --fork                go into the background once the socket is there
      --pid-file=PATH       write the process id into this file
      --selinux-label=LABEL label of the socket

Devices of the kernel:
  -c, --connect=DEV         connect the image to /dev/nbdN
  -d, --disconnect          disconnect /dev/nbdN

The image:
  -f, --format=FORMAT       format of the image: raw, qcow2
  -r, --read-only           clients cannot write
  -s, --snapshot            write into a temporary file that goes away at the end
  -l, --load-snapshot=SNAP  export an internal snapshot, read-only: an id, a name, or
                            snapshot.id=ID,snapshot.name=NAME
  -n, --nocache             --cache=none
      --cache=MODE          none, writeback (default), writethrough, directsync, unsafe
      --aio=MODE            threads, native, io_uring: taken, and io_uring is used
      --discard=MODE        ignore (default), unmap
      --detect-zeroes=MODE  off (default), on, unmap
      --image-opts          FILE has the form driver=qcow2,file.filename=disk.qcow2
";

#[cfg(test)]
mod tests {
    use super::{help, version};

    #[test]
    fn callers_find_what_they_look_for() {
        assert!(help("qemu-nbd").contains("selinux"));
        assert!(help("/bin/qemu-nbd").starts_with("Usage: /bin/qemu-nbd [OPTIONS] FILE"));
        assert_eq!(version("qemu-nbd", "0.1.0"), "qemu-nbd 11.1.3 (ringdisk 0.1.0)\n");
    }
}
