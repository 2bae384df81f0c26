#include <photon/thread/thread.h>
#include <photon/io/fd-events.h>
#include <photon/fs/localfs.h>
#include <photon/common/alog.h>
#include <photon/common/uuid.h>
#include "src/overlaybd/lsmt/file.h"
#include "src/overlaybd/lsmt/index.h"
#include <fcntl.h>
#include <unistd.h>
#include <string.h>
#include <stdlib.h>
#include <vector>
#include <string>
using namespace photon::fs;
// driver write <data> <index> <sealed> <script>   : script lines: "w off len seed" | "z off len"
// driver commit <sealed> <out> uuid parent
// driver read <vsize_out|-> layer0 layer1 ... > stdout raw image
static void fill(std::vector<char>&b, uint64_t seed){ uint64_t x=seed*0x9e3779b97f4a7c15ull+1; for(size_t i=0;i<b.size();i+=8){ x^=x<<13;x^=x>>7;x^=x<<17; memcpy(&b[i],&x,8);} }
int main(int argc,char**argv){
  log_output_level=ALOG_ERROR;
  photon::vcpu_init();
  std::string cmd=argv[1];
  auto op=[&](const char*p,int fl){ auto f=open_localfile_adaptor(p,fl,0644,0); if(!f){perror(p);exit(1);} return f; };
  if(cmd=="write"){
    auto fd=op(argv[2],O_RDWR|O_CREAT|O_TRUNC), fi=op(argv[3],O_RDWR|O_CREAT|O_TRUNC);
    LSMT::LayerInfo a(fd,fi); a.virtual_size=strtoull(argv[5],0,10);
    a.uuid.parse("11111111-2222-3333-4444-555555555555",36);
    auto f=LSMT::create_file_rw(a,false);
    FILE*s=fopen(argv[4],"r"); char k; unsigned long long o,l,sd;
    while(fscanf(s," %c %llu %llu %llu",&k,&o,&l,&sd)==4){
      if(k=='w'){ std::vector<char>b(l); fill(b,sd); if(f->pwrite(b.data(),l,o)!=(ssize_t)l){puts("write failed");return 1;} }
      else if(f->fallocate(3,o,l)){puts("discard failed");return 1;}
    }
    if(f->fsync()){puts("fsync");return 1;}
    if(argc>6) { if(f->close_seal(nullptr)) {puts("seal failed");return 1;} }
    return 0;
  }
  if(cmd=="readrw"){
    auto fd=op(argv[2],O_RDWR), fi=op(argv[3],O_RDWR);
    auto f=LSMT::open_file_rw(fd,fi,false); if(!f){puts("open rw failed");return 1;}
    struct stat st; f->fstat(&st); std::vector<char>b(1<<20);
    for(off_t o=0;o<st.st_size;o+=b.size()){ size_t n=std::min<off_t>(b.size(),st.st_size-o); if(f->pread(b.data(),n,o)!=(ssize_t)n){fprintf(stderr,"read failed\n");return 1;} if(::write(1,b.data(),n)<0)return 1; }
    return 0;
  }
  if(cmd=="commit"){
    auto src=op(argv[2],O_RDONLY); auto out=op(argv[3],O_RDWR|O_CREAT|O_TRUNC);
    auto f=LSMT::open_file_ro(src,false); if(!f){puts("open failed");return 1;}
    LSMT::CommitArgs c(out); memcpy((char*)&c.uuid,argv[4],37); memcpy((char*)&c.parent_uuid,argv[5],37);
    return ((LSMT::IFileRW*)f)->commit(c);
  }
  if(cmd=="merge"){
    std::vector<IFile*> v; for(int i=3;i<argc;i++) v.push_back(op(argv[i],O_RDONLY));
    auto out=op(argv[2],O_RDWR|O_CREAT|O_TRUNC); LSMT::CommitArgs c(out);
    return LSMT::merge_files_ro(v.data(),v.size(),c);
  }
  if(cmd=="read"){
    std::vector<IFile*> v; for(int i=2;i<argc;i++) v.push_back(op(argv[i],O_RDONLY));
    auto f=LSMT::open_files_ro(v.data(),v.size(),false); if(!f){fprintf(stderr,"open failed\n");return 1;}
    struct stat st; f->fstat(&st); std::vector<char>b(1<<20);
    for(off_t o=0;o<st.st_size;o+=b.size()){ size_t n=std::min<off_t>(b.size(),st.st_size-o); if(f->pread(b.data(),n,o)!=(ssize_t)n){fprintf(stderr,"read failed\n");return 1;} if(::write(1,b.data(),n)<0)return 1; }
    return 0;
  }
}
